"""`doyen doctor [ELECTION]`: measure a store and check a configuration."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from doyen.cli._output import (
    Console,
    Exit,
    Table,
    add_lease_options,
    add_option,
    add_store_option,
    console,
    print_json,
    store_url,
)
from doyen.doctor import Examination, duration, examine
from doyen.election.options import SessionSettings
from doyen.errors import StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.model import Level
from doyen.stores.choice import without_password
from doyen.stores.port import Context, open_store

OPEN_WITHIN_S = 10.0
"""The time limit for opening the store."""

MANUAL = """\
Measures the latency of the store, with temporary keys, and derives from the ttl and the stop budget
the safety margin for late renewals, the time in which the work must stop, and the worst-case
failover times of a crashed and of a silent leader. It warns of known problems: times that are too
short for this store, versions with known defects, storage that may lose confirmed writes. With
ELECTION it also checks that election.

Run it where the candidates run, because latencies and clocks are those of this machine. A store
that does not exist is an error, unless --create is given.

exit codes:
  0    no problem was found; there may be warnings
  1    there is a problem
  2    these times leave no safety margin; a session would refuse them
  others as for every command: see doyen --help

examples:
  doyen doctor
  # is a ttl of one second enough, for work that takes 0.2 s to stop?
  doyen doctor --store sqlite:///var/lib/app/doyen.db --ttl 1 --stop-budget 0.2
  # problems and warnings, for monitoring
  doyen doctor billing --json | jq '.findings[] | select(.level != "ok")'
"""

_STYLES: dict[Level, str | None] = {
    "ok": "green",
    "note": None,
    "warning": "yellow",
    "problem": "bold red",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "election", nargs="?", metavar="ELECTION", help="an election to check (default: none)"
    )
    add_store_option(parser)
    add_lease_options(parser, "work")
    add_option(parser, "--create", "create the store if it does not exist")


def run(args: argparse.Namespace) -> int:
    url = store_url(args, create=args.create)
    settings = SessionSettings(
        url=url, ttl_s=args.ttl, stop_budget_s=args.stop_budget, create=args.create
    )
    found = asyncio.run(_examine(settings, args.election))
    if args.json:
        print_json(_as_dict(found, url, args.election))
    else:
        _print(found, url, console())
    return Exit.DONE if found.ok else Exit.NO


async def _examine(settings: SessionSettings, election: str | None) -> Examination:
    clock = SystemClock()
    try:
        async with asyncio.timeout(OPEN_WITHIN_S):
            context = Context(clock, lambda event: None, settings.create)
            store = await open_store(settings.url, context)
    except TimeoutError as error:
        raise StoreUnavailable(
            f"the store at {without_password(settings.url)} did not answer within"
            f" {OPEN_WITHIN_S:g} s"
        ) from error
    try:
        return await examine(store, settings, clock, election=election)
    finally:
        await store.close()


def _print(found: Examination, url: str, out: Console) -> None:
    out.print(f"store  {without_password(url)}", style="bold")
    for table in (_latencies(found), _times(found.timing), _failovers(found)):
        out.print()
        out.print(table)
    out.print()
    for finding in found.findings:
        parts = [f"{finding.subject}: {finding.text}"]
        parts += [f"remedy: {finding.remedy}"] if finding.remedy else []
        lines = [line for part in parts for line in textwrap.wrap(part, 68)]
        for level, line in zip_longest([finding.level], lines, fillvalue=""):
            out.print(f"{level:<9} {line}", style=_STYLES[finding.level])
    out.print()
    out.print(_verdict(found), style="green" if found.ok else "bold red")


def _latencies(found: Examination) -> Table:
    count = max((len(each.samples_s) for each in found.latencies.values()), default=0)
    table = Table([f"latency of {count} each", ">p50", ">slowest"])
    for name, each in found.latencies.items():
        table.rows.append([name, duration(each.p50_s), duration(each.max_s)])
    return table


def _times(timing: Timing) -> Table:
    renewed = f"{duration(timing.renew_every_s)} ± {timing.renew_jitter:.0%}"
    table = Table(["times of a lease", "", ""])
    table.rows += [
        ["ttl", duration(timing.ttl_s), "lifetime of the lease without a renewal"],
        ["renewed every", renewed, ""],
        ["request timeout", duration(timing.request_timeout_s), "limit of one call to the store"],
        ["validity", duration(timing.validity_s), "of a renewal, from when it was sent"],
        ["stop budget", duration(timing.stop_budget_s), "for the work to end after a loss"],
        ["safety margin", duration(timing.margin_s), "left after one lost renewal"],
    ]
    return table


def _failovers(found: Examination) -> Table:
    crashed = "when its lease has expired"
    if found.capabilities.proof_of_death:
        usual_s = sum(each.p50_s for name, each in found.latencies.items() if name != "renewal")
        crashed = f"usually {duration(usual_s)} after the process has ended"
    table = Table(["failover", "worst case", ""])
    table.rows += [
        ["leader crashed", duration(found.worst_crash_failover_s), crashed],
        ["leader silent", duration(found.worst_failover_s), "frozen, or cut off from the store"],
    ]
    return table


def _verdict(found: Examination) -> str:
    counts = []
    for level in ("problem", "warning"):
        count = sum(finding.level == level for finding in found.findings)
        counts.append(f"{count or 'no'} {level}{'' if count == 1 else 's'}")
    return ", ".join(counts)


def _as_dict(found: Examination, url: str, election: str | None) -> dict[str, Any]:
    timing = found.timing
    return {
        "ok": found.ok,
        "store": without_password(url),
        "election": election,
        "timing": {
            **asdict(timing),
            "validity_s": timing.validity_s,
            "margin_s": timing.margin_s,
        },
        "latency": {
            name: {"count": len(each.samples_s), "p50_s": each.p50_s, "max_s": each.max_s}
            for name, each in found.latencies.items()
        },
        "failover": {
            "crashed_worst_s": found.worst_crash_failover_s,
            "silent_worst_s": found.worst_failover_s,
            "proof_of_death": found.capabilities.proof_of_death,
        },
        "findings": [finding._asdict() for finding in found.findings],
    }
