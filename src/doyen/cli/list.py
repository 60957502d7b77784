"""`doyen list [KIND …]`: show everything that a store has, once or, with `--watch`, live."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

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
from doyen.cli.leader import leader_dict
from doyen.cli.members import member_dict
from doyen.errors import ConfigError
from doyen.manage.inventory import (
    INVENTORY_KINDS,
    BarrierState,
    ConfigState,
    Inventory,
    InventoryKind,
    SemaphoreState,
    ShardSetState,
)
from doyen.model import Candidate, Line, Member
from doyen.session import connect

MANUAL = """\
Shows everything that a store has, or only the kinds that are named: elections, locks, semaphores,
barriers, groups, shards, configs. An election or a lock is shown while it has a leader or holder,
or a candidate.

With --watch the list is shown again after every change, until Ctrl-C. If the store does not answer
for a ttl, that is shown, with what was known last. With --json each state is a JSON object on a
line of its own.

exit codes:
  0    the store has something of these kinds; with --watch, ended by Ctrl-C
  1    it has nothing
  others as for every command: see doyen --help

examples:
  doyen list
  # a live view of elections and locks
  doyen list elections locks --watch
  # elections without a leader, for a script
  doyen list --json | jq -r '.elections[] | select(.leader == null).name'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kinds",
        metavar="KIND",
        nargs="*",
        help=f"what to show: {', '.join(INVENTORY_KINDS)} (default: everything)",
    )
    add_option(parser, "--watch", "show every change, until interrupted")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    url, kinds = store_url(args, create=False), args.kinds or INVENTORY_KINDS
    for kind in kinds:
        if kind not in INVENTORY_KINDS:
            raise ConfigError(f"KIND is one of {', '.join(INVENTORY_KINDS)}, not {kind!r}")
    if args.watch:
        return follow(_watch(url, kinds, args.json))
    seen = asyncio.run(_once(url, kinds))
    if args.json:
        print_json(as_dict(seen, kinds))
    else:
        print_view(console(), view(seen))
    return Exit.DONE if len(seen) else Exit.NO


async def _once(url: str, kinds: Sequence[InventoryKind]) -> Inventory:
    async with connect(url, create=False) as session:
        return await session.inventory(*kinds)


async def _watch(url: str, kinds: Sequence[InventoryKind], as_json: bool) -> None:
    async with connect(url, create=False) as session:
        await show_stream(
            session,
            session.observe_inventory(*kinds),
            view,
            lambda seen: as_dict(seen or Inventory(), kinds),
            as_json=as_json,
        )


def view(seen: Inventory) -> View:
    """The inventory as text: a title, and a table for each kind that the store has."""
    parts = []
    for kind in INVENTORY_KINDS:
        states = getattr(seen, kind)
        if states:
            headings, row = _TABLES[kind]
            table = Table(
                headings, [[printable(name), *row(each)] for name, each in states.items()]
            )
            for number, state in enumerate(states.values()):
                if isinstance(state, Line) and state.leader is None:
                    table.styles[number] = "bold red"
            parts.append(table)
    counts = [_count(kind, len(getattr(seen, kind))) for kind in INVENTORY_KINDS]
    return View(", ".join(filter(None, counts)) or "nothing here", parts)


_ONE: Mapping[InventoryKind, str] = {
    "semaphores": "semaphore",
    "barriers": "barrier",
    "shards": "set of shards",
    "configs": "configuration",
}


def _count(kind: InventoryKind, number: int) -> str:
    """
    >>> _count("shards", 2), _count("groups", 1), _count("locks", 0)
    ('2 sets of shards', '1 group', '')
    """
    one = _ONE.get(kind, kind.removesuffix("s"))
    many = "sets of shards" if kind == "shards" else f"{one}s"
    return f"{number} {one if number == 1 else many}" if number else ""


def when(at: float | None) -> str:
    """A time in seconds since 1970 as text, in the local time zone."""
    if not at:
        return ""
    try:
        return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return ""


def _waiting(candidates: Sequence[Candidate]) -> str:
    names = [printable(each.name) for each in candidates if not each.leads]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _line_row(line: Line) -> list[str]:
    waiting = _waiting(line.candidates)
    if line.leader is None:
        return ["-", "", "", waiting]
    leader = line.leader
    return [printable(leader.name), str(leader.token), when(leader.since), waiting]


def _semaphore_row(state: SemaphoreState) -> list[str]:
    holders = [f"{slot}: {printable(each.name)}" for slot, each in state.holders.items()]
    taken = f"{len(state.holders)} of {state.slots or '?'}"
    return [taken, ", ".join(holders), _waiting(state.waiting)]


def _barrier_row(state: BarrierState) -> list[str]:
    return [f"{state.arrived} of {state.n or '?'}", str(state.passed)]


def _group_row(members: tuple[Member, ...]) -> list[str]:
    notable = [
        f"{printable(each.name)} {'suspected' if each.suspected else each.state}"
        for each in members
        if each.suspected or each.state != "up"
    ]
    names = ", ".join(printable(each.name) for each in members[:5])
    more = f" and {len(members) - 5} more" if len(members) > 5 else ""
    return [str(len(members)), names + more, ", ".join(notable)]


def _shards_row(state: ShardSetState) -> list[str]:
    seen, count = state.map, state.map.count or state.count
    notable = [printable(state.error)] if state.error else []
    if seen.moves:
        notable.append(f"{len(seen.moves)} moving")
    if seen.aside:
        notable.append(f"{len(seen.aside)} set aside")
    if seen.note:
        notable.append(printable(seen.note))
    return [str(count), str(len(state.owners)), str(len(seen.members)), ", ".join(notable)]


def _config_row(state: ConfigState) -> list[str]:
    if state.error:
        return [str(state.version or ""), "", "", "", printable(state.error)]
    numbers = str(state.kept), str(state.subscribers)
    return [str(state.version), *numbers, when(state.at), printable(state.author)]


_TABLES: Mapping[InventoryKind, tuple[list[str], Callable[[Any], list[str]]]] = {
    "elections": (["election", "leader", ">token", "since", "waiting"], _line_row),
    "locks": (["lock", "holder", ">token", "since", "waiting"], _line_row),
    "semaphores": (["semaphore", ">taken", "holders", "waiting"], _semaphore_row),
    "barriers": (["barrier", ">arrived", ">passed"], _barrier_row),
    "groups": (["group", ">members", "names", "notable"], _group_row),
    "shards": (["shards", ">count", ">owned", ">members", "notable"], _shards_row),
    "configs": (
        ["configuration", ">version", ">earlier", ">subscribers", "written", "by"],
        _config_row,
    ),
}


def as_dict(seen: Inventory, kinds: Sequence[InventoryKind] = INVENTORY_KINDS) -> dict[str, Any]:
    """The inventory for programs: for each kind, a list of objects with a name."""
    return {
        "as_of": seen.as_of,
        **{
            kind: [{"name": name, **_DICTS[kind](state)} for name, state in _of(seen, kind)]
            for kind in kinds
        },
    }


def _of(seen: Inventory, kind: InventoryKind) -> Sequence[tuple[str, Any]]:
    return [*getattr(seen, kind).items()]


def _candidate(each: Candidate) -> dict[str, Any]:
    return {
        "name": each.name,
        "priority": each.priority,
        "leads": each.leads,
        "meta": dict(each.meta),
    }


def _line_dict(line: Line) -> dict[str, Any]:
    return {"leader": leader_dict(line.leader), "line": [*map(_candidate, line.candidates)]}


def _semaphore_dict(state: SemaphoreState) -> dict[str, Any]:
    return {
        "slots": state.slots,
        "holders": {str(slot): leader_dict(each) for slot, each in state.holders.items()},
        "waiting": [*map(_candidate, state.waiting)],
    }


def _shards_dict(state: ShardSetState) -> dict[str, Any]:
    seen = state.map
    return {
        "count": seen.count or state.count,
        "generation": seen.generation,
        "version": seen.version,
        "members": [*seen.members],
        "owned": len(state.owners),
        "moving": len(seen.moves),
        "aside": len(seen.aside),
        "note": seen.note,
        "error": state.error,
    }


_DICTS: Mapping[InventoryKind, Callable[[Any], dict[str, Any]]] = {
    "elections": _line_dict,
    "locks": _line_dict,
    "semaphores": _semaphore_dict,
    "barriers": lambda state: {"n": state.n, "arrived": state.arrived, "passed": state.passed},
    "groups": lambda members: {"members": [*map(member_dict, members)]},
    "shards": _shards_dict,
    "configs": lambda state: {
        "version": state.version,
        "author": state.author,
        "at": state.at,
        "earlier": state.kept,
        "subscribers": state.subscribers,
        "error": state.error,
    },
}
