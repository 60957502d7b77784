"""`doyen verify LOG…`: prove from audit logs that there were never two leaders at a time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from doyen.audit import Report, verify
from doyen.cli._output import Console, Exit, add_option, console, print_json, printable
from doyen.errors import ConfigError

MANUAL = """\
Reads the audit logs of all processes of one store and proves or disproves that no two terms of an
election overlapped, that every token is greater than the tokens before it, and that no process led
outside its term. `doyen run --audit` and `connect(..., audit=)` write such logs. Terms of one boot
of one machine are compared on its boot-time clock; terms of different machines or boots are
compared on the wall clocks, so that the result is only as accurate as these clocks. With --html the
proof and a timeline of all terms are also written as a page that needs no server.

exit codes:
  0    proved
  1    disproved: each violation is printed; or not proved, because events are
       missing from the logs or lines cannot be read
  2    the logs contain nothing to verify
  others as for every command: see doyen --help

examples:
  doyen verify /var/log/app/*.jsonl
  # the same as a page with a timeline of all terms, in one file
  doyen verify --html report.html /var/log/app/*.jsonl
  # logs of several machines whose clocks agree to a tenth of a second
  doyen verify --tolerance 0.1 host1.jsonl host2.jsonl
"""

SHOWN = 20
"""How many items of each list are printed as text; --json has all."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="LOG", help="an audit log")
    text = "the greatest difference between the wall clocks of the machines"
    add_option(parser, "--tolerance TIME", text, "0", dest="tolerance_s")
    add_option(parser, "--html FILE", "write the proof as a page with a timeline (default: none)")


def run(args: argparse.Namespace) -> int:
    report = verify(args.logs, tolerance_s=args.tolerance_s)
    if args.html:
        from doyen.web.report import report_page

        _write(Path(args.html), report_page(report))
    if args.json:
        print_json(report.as_dict())
    else:
        _print(report, console())
    if report.verdict == "empty":
        return Exit.USAGE
    return Exit.DONE if report.ok else Exit.NO


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page {path} cannot be written: {error.strerror}") from error


def _print(report: Report, out: Console) -> None:
    out.print(_counts(report))
    if report.gaps_s:
        out.print(
            f"time between terms: median {report.gap_p50_s:.3f} s, maximum {report.gap_max_s:.3f} s"
        )
    if report.wall_clocks_compared:
        out.print(
            "the logs come from different machines or boots, which are compared on their wall"
            f" clocks, with a tolerance of {report.tolerance_s:g} s"
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
            lacking.append(f"{_count(report.missing, 'event is', 'events are')} missing")
        if report.unreadable:
            lacking.append(f"{_count(report.unreadable, 'line', 'lines')} cannot be read")
        if report.without_beginning:
            ends = _count(report.without_beginning, "term ends", "terms end")
            lacking.append(f"{ends} in these logs without beginning in them")
        out.print(
            f"not proved: {', '.join(lacking)}. The other lines show no violation",
            style="yellow",
        )
    elif report.ok:
        out.print(
            "proved: no two terms overlapped, every token is greater than the tokens before it,"
            " no process led outside its term" + ("; see the warnings" if report.warnings else ""),
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
    return ", ".join(_count(*each) for each in counts)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _list(out: Console, title: str, items: Iterable[str], style: str | None = None) -> None:
    listed = list(items)
    if not listed:
        return
    out.print(title, style=style)
    for item in listed[:SHOWN]:
        out.print("  " + "\n  ".join(map(printable, item.split("\n"))))
    if len(listed) > SHOWN:
        out.print(f"  and {len(listed) - SHOWN} more; --json has all")
