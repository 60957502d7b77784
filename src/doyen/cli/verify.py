"""`doyen verify LOG…`: prove from audit logs that there never were two leaders."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from doyen.audit import Report, verify
from doyen.cli._manual import manual
from doyen.cli._output import Console, Exit, console, print_json

__all__ = ["MANUAL", "configure", "run"]

MANUAL = """\
Reads the audit logs of all processes of one store together and proves, or disproves, that no two
terms of an election overlapped, that every token is greater than those before it, and that nobody
led outside its term. Logs are written by `doyen run --audit` and by `connect(..., audit=)`. Within
one boot of one machine terms are compared on the boot-time clock; across machines on their wall
clocks, which is as good as these are.

exit codes:
  0    proved
  1    disproved: what happened is told, violation by violation; or not proved,
       because the logs say that events are missing from them, or have lines
       that cannot be read
  2    there was nothing to verify
  others as for every command: see doyen --help

examples:
  doyen verify /var/log/app/*.jsonl
  # logs of several machines whose clocks agree to a tenth of a second
  doyen verify --tolerance 0.1 host1.jsonl host2.jsonl
"""

SHOWN = 20
"""How much of each kind is shown to people; --json has all."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a file written with audit=")
    parser.add_argument(
        "--tolerance",
        dest="tolerance_s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="by how much the wall clocks of different machines may disagree (default: 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; its verdict is the exit code."""
    report = verify(args.logs, tolerance_s=args.tolerance_s)
    if args.json:
        print_json(report.as_dict())
    else:
        _tell(report, console())
    if report.verdict == "empty":
        return Exit.USAGE
    return Exit.DONE if report.ok else Exit.NO


def _tell(report: Report, out: Console) -> None:
    out.print(_counts(report))
    if report.gaps_s:
        out.print(
            f"between one term and the next: {report.gap_p50_s:.3f} s at the median,"
            f" {report.gap_max_s:.3f} s at most"
        )
    if report.wall_clocks_compared:
        out.print(
            "different machines or boots: their wall clocks were compared,"
            f" with a tolerance of {report.tolerance_s:g} s"
        )
    _list(
        out, f"lines ignored: {len(report.ignored)}", (f"{w}: {why}" for w, why in report.ignored)
    )
    _list(out, f"warnings: {len(report.warnings)}", report.warnings)
    out.print()
    if report.verdict == "empty":
        out.print("nothing to verify: no term begins in these logs", style="yellow")
    elif report.verdict == "incomplete":
        lacking = []
        if report.missing:
            lacking.append(f"{report.missing} events are missing from these logs")
        if report.unreadable:
            lacking.append(f"{report.unreadable} lines of these logs cannot be read")
        out.print(
            f"not proved: {', and '.join(lacking)}. The rest contradicts nothing: no two terms are"
            " known to have overlapped",
            style="yellow",
        )
    elif report.ok:
        out.print(
            "proved: no two terms overlapped, every token is greater than those before it,"
            " nobody led outside its term"
            + ("; what is not covered is said above" if report.warnings else ""),
            style="green",
        )
    else:
        stories = (violation.story for violation in report.violations)
        _list(out, f"VIOLATIONS: {len(report.violations)}", stories, style="bold red")


def _counts(report: Report) -> str:
    counts = [
        (report.files, "file", "files"),
        (report.lines, "line", "lines"),
        (report.processes, "process", "processes"),
        (report.elections, "election", "elections"),
        (report.terms, "term", "terms"),
        (report.changes, "change of leader", "changes of leader"),
    ]
    return ", ".join(f"{number} {one if number == 1 else many}" for number, one, many in counts)


def _list(out: Console, title: str, items: Iterable[str], style: str | None = None) -> None:
    listed = list(items)
    if not listed:
        return
    out.print(title, style=style)
    for item in listed[:SHOWN]:
        out.print("  " + item.replace("\n", "\n  "))
    if len(listed) > SHOWN:
        out.print(f"  and {len(listed) - SHOWN} more; --json has all")
