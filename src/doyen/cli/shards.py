"""`doyen shards NAME`: show who owns the shards of a set, and change the set."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    Table,
    add_option,
    add_store_option,
    console,
    follow,
    print_json,
    printable,
    store_url,
)
from doyen.cli._screen import View, print_view, show_stream
from doyen.errors import BadDocument, ConfigError
from doyen.manage.shards.routing import ShardMap, map_of
from doyen.manage.shards.scopes import BlockingShardSet
from doyen.session import connect
from doyen.stores.kit.durations import parse_duration

MANUAL = """\
Shows how many shards each member of a set owns, which shards are being moved, on which members
shards keep failing, and which were set aside because they failed on several or on all. With --watch
every change is shown, until Ctrl-C.

Actions change what is asked of the set, and its controller carries that out:

  create COUNT       create the set with this number of shards
  resize COUNT       change the number of shards
  move SHARD MEMBER  make a member the preferred owner of a shard, and wait
                     until it owns it; without MEMBER, remove the preference
  drain MEMBER       give a member the weight 0, and wait until it owns nothing
  rebalance          make loads as equal as possible
  pause, resume      keep the plan as it is, for maintenance; end that
  retry              try shards again where they failed or were prepared too
                     slowly, also those that were set aside
  set FIELD=VALUE …  change other fields, such as grace_s=30s or standbys=1

exit codes:
  0    done; every shard that is shown has an owner
  1    the set does not exist, a shard has no owner, or the request was not
       carried out in time
  others as for every command: see doyen --help

examples:
  doyen shards jobs --watch
  # before a deployment, and after it
  doyen shards jobs drain server1 --wait 300
  doyen shards jobs drain server1 --undo
  # what would move
  doyen shards jobs rebalance --dry-run
"""

ACTIONS = (
    "show",
    "create",
    "resize",
    "move",
    "drain",
    "rebalance",
    "pause",
    "resume",
    "retry",
    "set",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="NAME", help="the name of the set")
    parser.add_argument(
        "do", metavar="ACTION", nargs="?", default="show", choices=ACTIONS, help="default: show"
    )
    parser.add_argument("values", metavar="VALUE", nargs="*", help="what the action requires")
    add_option(parser, "--watch", "show every change, until interrupted")
    add_option(parser, "--dry-run", "with rebalance: show the moves, and change nothing")
    add_option(parser, "--undo", "with drain: restore the weight")
    add_option(parser, "--anyway", "with drain: even if no other member could take the shards")
    add_option(parser, "--force", "with create: replace a spec that cannot be read")
    add_option(parser, "--wait TIME", "the time in which a request must be carried out", "60")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    creates = args.do == "create"
    url = store_url(args, create=creates)
    for flag, action in (
        ("watch", "show"),
        ("dry_run", "rebalance"),
        ("undo", "drain"),
        ("anyway", "drain"),
        ("force", "create"),
    ):
        if getattr(args, flag) and args.do != action:
            raise ConfigError(f"--{flag.replace('_', '-')} is for {action} only")
    if args.watch:
        _values(args, 0)
        return follow(_watch(url, args))
    with connect_blocking(url, create=creates) as session:
        return _do(session.shards(args.shards), args)


def _values(args: argparse.Namespace, least: int, most: int | None = None) -> list[str]:
    values: list[str] = args.values
    if not least <= len(values) <= (least if most is None else most):
        raise ConfigError(f"wrong number of values for {args.do}: see doyen help shards")
    return values


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{what} is a whole number, 0 or above, not {text!r}")
    return int(text)


def _do(shards: BlockingShardSet, args: argparse.Namespace) -> int:
    match args.do:
        case "create" | "resize":
            count = _number(_values(args, 1)[0], "the count")
            if _exists(shards, args) == (args.do == "create"):
                state = (
                    "exists already; resize changes its number of shards"
                    if args.do == "create"
                    else "does not exist: create it first"
                )
                raise ConfigError(f"the set of shards {args.shards!r} {state}")
            return _spec(args, shards.configure(count=count, force=args.force).encode())
        case "move":
            shard, *to = _values(args, 1, 2)
            number = _number(shard, "the shard")
            return _show(args, shards.move(number, to=to[0] if to else None, wait_s=args.wait))
        case "drain":
            (member,) = _values(args, 1)
            seen = shards.drain(member, undo=args.undo, anyway=args.anyway, wait_s=args.wait)
            return _show(args, seen)
        case "rebalance":
            _values(args, 0)
            moves = shards.rebalance(dry_run=args.dry_run)
            if args.json:
                print_json({"set": args.shards, "moves": [each._asdict() for each in moves]})
            else:
                table = Table([">shard", "from", "to"])
                for each in moves:
                    names = printable(each.owner or "-"), printable(each.to)
                    table.rows.append([str(each.shard), *names])
                console().print(table if moves else "nothing to move")
            return Exit.DONE
        case "pause" | "resume":
            _values(args, 0)
            return _spec(args, shards.configure(paused=args.do == "pause").encode())
        case "retry":
            _values(args, 0)
            return _spec(args, shards.retry().encode())
        case "set":
            return _spec(args, shards.configure(**_changes(_values(args, 1, 99))).encode())
    _values(args, 0)
    return _show(args, shards.map())


def _exists(shards: BlockingShardSet, args: argparse.Namespace) -> bool:
    try:
        return shards.spec() is not None
    except BadDocument:
        if not args.force:
            raise
        return False


def _changes(values: list[str]) -> dict[str, Any]:
    changes = {}
    for value in values:
        field, equals, text = value.partition("=")
        try:
            changes[field] = parse_duration(text) if field.endswith("_s") else json.loads(text)
        except ValueError:
            equals = ""
        if not equals or isinstance(changes[field], dict | list):
            raise ConfigError(
                f"{value!r} is not FIELD=VALUE with a number of 0 or above, true or false, such as"
                " grace_s=30"
            )
    return changes


def _spec(args: argparse.Namespace, spec: dict[str, Any]) -> int:
    if args.json:
        print_json({"set": args.shards, "spec": spec})
    else:
        fields = ", ".join(f"{name}={printable(value)}" for name, value in spec.items())
        console().print(f"{printable(args.shards)}: {fields}")
    return Exit.DONE


async def _watch(url: str, args: argparse.Namespace) -> None:
    async with connect(url, create=False) as session:
        await show_stream(
            session,
            session.observe_shards(args.shards),
            _view,
            lambda seen: as_dict(seen or map_of(args.shards, None)),
            as_json=args.json,
        )


def _show(args: argparse.Namespace, seen: ShardMap) -> int:
    if args.json:
        print_json(as_dict(seen))
    else:
        print_view(console(), _view(seen))
    return Exit.DONE if seen.open and seen.owners and "" not in seen.owners else Exit.NO


def _view(seen: ShardMap) -> View:
    notable = "\n".join(_notable(seen))
    parts = [_table(seen) if seen.members else "", notable]
    return View(_title(seen), [part for part in parts if part])


def _title(seen: ShardMap) -> str:
    if not seen.generation:
        return f"{printable(seen.shards)} has no plan: it does not exist, or has no members"
    unowned = seen.count if not seen.open else seen.owners.count("")
    return (
        f"{printable(seen.shards)}: {seen.count} shards, generation {seen.generation},"
        f" plan {seen.version}; {unowned or 'none'} without an owner"
    )


def _table(seen: ShardMap) -> Table:
    loads = Counter(seen.owners)
    coming = Counter(move.to for move in seen.moves.values())
    table = Table(["member", ">shards", ">coming", ">weight", "zone", "address"])
    for name, member in sorted(seen.members.items()):
        shown = (
            name
            if name not in seen.grace
            else f"{name} (gone, {seen.grace[name]:.0f} s left at most)"
        )
        counts = [str(loads[name]), str(coming[name] or "")]
        about = [f"{member.weight:g}", printable(member.zone), printable(member.address)]
        table.rows.append([printable(shown), *counts, *about])
    return table


def _notable(seen: ShardMap) -> list[str]:
    lines = []
    for shard, move in sorted(seen.moves.items()):
        state = "stuck: the old owner has not ended" if move.stuck else "preparing"
        if move.ready and not move.stuck:
            state = "the old owner is ending"
        owner = printable(seen.owners[shard])
        lines.append(f"shard {shard} moves from {owner} to {printable(move.to)}: {state}")
    for shard, error in sorted(seen.aside.items()):
        lines.append(f"shard {shard} is set aside: {printable(error)}")
    for shard, names in sorted(seen.failed.items()):
        lines.append(f"the body of shard {shard} keeps failing on {printable(', '.join(names))}")
    for shard, names in sorted(seen.slow.items()):
        lines.append(f"shard {shard} was prepared too slowly on {printable(', '.join(names))}")
    if seen.note:
        lines.append(printable(seen.note))
    return lines


def as_dict(seen: ShardMap) -> dict[str, Any]:
    """The map for programs."""
    return {
        "set": seen.shards,
        "generation": seen.generation,
        "version": seen.version,
        "open": seen.open,
        "owners": [owner or None for owner in seen.owners],
        "standbys": [[name or None for name in column] for column in seen.standbys],
        "members": {name: member._asdict() for name, member in seen.members.items()},
        "grace": dict(seen.grace),
        "moves": {str(shard): move._asdict() for shard, move in seen.moves.items()},
        "aside": {str(shard): error for shard, error in seen.aside.items()},
        "failed": {str(shard): list(names) for shard, names in seen.failed.items()},
        "slow": {str(shard): list(names) for shard, names in seen.slow.items()},
        "note": seen.note,
    }
