"""`doyen members GROUP`: show the members of a group, once or, with `--watch`, at every change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
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
from doyen.cli._screen import lost_text
from doyen.errors import ConfigError
from doyen.model import Member, MemberChange, Reachable, Unreachable
from doyen.session import connect

MANUAL = """\
Reads the members of a group from the store and prints them in the order of their names. "silent" is
the number of seconds since a member's last renewal, on stores that tell. A member is suspected when
its renewals are late, and gone when its lease has ended.

With --watch each member is printed as joined, and then every change, until Ctrl-C; also that the
store does not answer, after a ttl, and that it answers again. With --json each change is a JSON
object on a line of its own.

With --prometheus the output is what Prometheus reads from files and over HTTP (http_sd_config): the
members whose meta has an "address", with their name, state and the texts and numbers of their meta
as labels. Of an address http://host:port the target is host:port, and __scheme__ is a label.

exit codes:
  0    the group has members; with --watch, ended by Ctrl-C
  1    it has none
  others as for every command: see doyen --help

examples:
  doyen members workers
  doyen members workers --watch
  # the addresses of all members, for a script
  doyen members workers --json | jq -r '.members[].meta.address'
  # targets for Prometheus' file_sd_config
  doyen members workers --prometheus > targets.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", metavar="GROUP", help="the group's name")
    add_store_option(parser)
    add_option(parser, "--watch", "show every change, until interrupted")
    add_option(parser, "--prometheus", "print targets for Prometheus")


def run(args: argparse.Namespace) -> int:
    if args.watch and args.prometheus:
        raise ConfigError("--prometheus prints the targets once: leave --watch out")
    if args.watch:
        return follow(_watch(store_url(args, create=False), args.group, args.json))
    with connect_blocking(store_url(args, create=False), create=False) as session:
        members = session.members(args.group)
    if args.prometheus:
        print_json(prometheus_targets(args.group, members))
    elif args.json:
        print_json({"group": args.group, "members": [member_dict(each) for each in members]})
    else:
        _print(args.group, members)
    return Exit.DONE if members else Exit.NO


async def _watch(url: str, group: str, as_json: bool) -> None:
    out = console()
    async with connect(url, create=False) as session:
        async for change in session.observe_members(group):
            at = datetime.now().astimezone()
            if as_json:
                seen = {"at": at.isoformat(timespec="milliseconds"), "group": group}
                print_json({**seen, **change_dict(change)})
            else:
                out.print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], change_text(change))


Change = MemberChange | Unreachable[tuple[Member, ...]] | Reachable


def change_dict(change: Change) -> dict[str, Any]:
    """A change as `--json` prints it."""
    if isinstance(change, Unreachable):
        last = [member_dict(each) for each in change.last or ()]
        why = {"unreachable_since": change.since, "error": change.error}
        return {"change": "unreachable", **why, "members": last}
    if isinstance(change, Reachable):
        return {"change": "reachable", "since": change.since}
    member = {**member_dict(change.member), "silent_s": change.silent_s}
    return {"change": change.kind, "member": member}


def change_text(change: Change) -> str:
    """
    >>> change_text(MemberChange("suspected", Member("w1", 7), 3.21))
    'w1 suspected, silent for 3.2 s, incarnation 7'
    """
    if isinstance(change, Unreachable):
        return lost_text(change, f"{len(change.last or ())} members")
    if isinstance(change, Reachable):
        return "the store answers again"
    member = change.member
    state = f", {member.state}" if member.state != "up" else ""
    reason = f" ({printable(member.reason)})" if member.reason else ""
    silent = ""
    if change.kind in ("suspected", "gone") and change.silent_s is not None:
        silent = f", silent for {change.silent_s:.1f} s"
    meta = f", {printable(member.meta)}" if member.meta else ""
    return (
        f"{printable(member.name)} {change.kind}{state}{reason}{silent},"
        f" incarnation {member.incarnation}{meta}"
    )


def _print(group: str, members: Sequence[Member]) -> None:
    out = console()
    out.print(f"{group} has {len(members) or 'no'} member{'' if len(members) == 1 else 's'}")
    if not members:
        return
    table = Table(["name", "state", ">silent", ">incarnation", "meta"])
    for row, member in enumerate(members):
        state = f"{member.state}, suspected" if member.suspected else member.state
        table.rows.append(
            [
                printable(member.name),
                f"{state}: {printable(member.reason)}" if member.reason else state,
                "" if member.silent_s is None else f"{member.silent_s:.1f} s",
                str(member.incarnation),
                printable(member.meta) if member.meta else "",
            ]
        )
        if member.suspected or member.state == "unhealthy":
            table.styles[row] = "bold red"
    out.print()
    out.print(table)


def member_dict(member: Member) -> dict[str, Any]:
    """A member as `--json` prints it."""
    return {
        "name": member.name,
        "incarnation": member.incarnation,
        "state": member.state,
        "reason": member.reason,
        "suspected": member.suspected,
        "silent_s": member.silent_s,
        "since": member.since,
        "meta": dict(member.meta),
    }


def prometheus_targets(group: str, members: Sequence[Member]) -> list[dict[str, Any]]:
    """The members with an address, in the format of Prometheus' HTTP service discovery. A target is
    host:port, and the scheme is a label.

    >>> prometheus_targets("workers", [Member("w1", 7, meta={"address": "10.0.0.1:80", "z": 2})])
    ... # doctest: +NORMALIZE_WHITESPACE
    [{'targets': ['10.0.0.1:80'], 'labels': {'__meta_doyen_group': 'workers',
      '__meta_doyen_name': 'w1', '__meta_doyen_state': 'up', '__meta_doyen_meta_z': '2'}}]
    """
    targets = []
    for member in members:
        address = member.meta.get("address")
        scheme, _, rest = address.rpartition("://") if isinstance(address, str) else ("", "", "")
        target = rest.partition("/")[0].rpartition("@")[2]
        if not target:
            continue
        labels = {
            "__meta_doyen_group": group,
            "__meta_doyen_name": member.name,
            "__meta_doyen_state": member.state,
        }
        if scheme in ("http", "https"):
            labels["__scheme__"] = scheme
        for name, value in member.meta.items():
            if name != "address" and isinstance(value, str | int | float):
                plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
                labels[f"__meta_doyen_meta_{plain}"] = str(value)
        targets.append({"targets": [target], "labels": labels})
    return targets
