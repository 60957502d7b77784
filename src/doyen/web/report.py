"""The report of `doyen verify` as a page of one file: the verdict, its proof, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doyen.audit import AuditViolation, Report, TermEvidence
from doyen.audit.history import loss_reason
from doyen.web.inline import ASSETS, one_file
from doyen.web.terms import EndCause, clipped, ordered_end

__all__ = ["report_page"]

ENDS: Sequence[tuple[str, EndCause]] = (
    ("resigned", "released"),
    ("lost", "lost"),
    ("found died", "died"),
    ("found expired", "expired"),
    ("the last deadline", "expired"),
)
VERDICTS = {
    "proved": (
        "Proved",
        "No two terms overlapped, every token is greater than the tokens before it, and no process"
        " led outside its term.",
    ),
    "disproved": ("Disproved", "The logs contradict the guarantees. Each violation is below."),
    "incomplete": (
        "Not proved",
        "Events are missing from the logs, or lines cannot be read. What is there shows no"
        " violation.",
    ),
    "empty": ("Nothing to verify", "No term begins in these logs."),
}


def report_page(report: Report) -> str:
    """The page."""
    heading, text = VERDICTS[report.verdict]
    data = {
        "verdict": report.verdict,
        "heading": heading,
        "text": text,
        "figures": _figures(report),
        "clocks": _clocks(report),
        "tolerance": report.tolerance_s if report.wall_clocks_compared else 0.0,
        "warnings": [*report.warnings, *(f"{where}: {why}" for where, why in report.ignored[:50])],
        "violations": [_violation(each) for each in report.violations],
        "elections": _elections(report),
    }
    body = (ASSETS / "report.html").read_text()
    return one_file(
        f"doyen verify: {heading.lower()}",
        body,
        ["text.js", "timeline.js", "report.js"],
        ["style.css", "report.css"],
        data,
    )


def _figures(report: Report) -> list[list[Any]]:
    counted = (
        (report.elections, "election", "elections"),
        (report.terms, "term", "terms"),
        (report.changes, "change of leader", "changes of leader"),
        (report.processes, "process", "processes"),
        (report.lines, "line read", "lines read"),
    )
    figures: list[list[Any]] = [[n, one if n == 1 else many] for n, one, many in counted]
    if report.gap_p50_s is not None and report.gap_max_s is not None:
        figures.append([f"{report.gap_p50_s:.3f} · {report.gap_max_s:.3f} s", "gap, p50 · max"])
    return figures


def _clocks(report: Report) -> str:
    if not report.wall_clocks_compared:
        return "All times were compared on the boot-time clock of one machine."
    return (
        "The logs come from different machines or boots, which were compared on their wall clocks,"
        f" with a tolerance of {report.tolerance_s:g} s."
    )


def _violation(found: AuditViolation) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "election": found.election,
        "headline": found.headline,
        "story": found.story.removeprefix(f"{found.headline}\n"),
        "at": found.when.wall,
        "by": max(0.0, found.by_s),
    }


def _elections(report: Report) -> list[dict[str, Any]]:
    """The lanes. The terms of one election are in the order of their beginning."""
    lanes: dict[tuple[str, str], dict[str, Any]] = {}
    for term in report.held:
        lane = lanes.setdefault(
            (term.election_kind, term.election),
            {"kind": term.election_kind, "name": term.election, "terms": [], "marks": []},
        )
        lane["terms"].append(_term(term))
    for number, found in enumerate(report.violations):
        kinds = {term.election_kind for term in found.terms} or {"elections"}
        for kind in kinds:
            if (lane_of := lanes.get((kind, found.election or ""))) is not None:
                mark = {"from": found.when.wall, "to": found.when.wall + max(0.0, found.by_s)}
                lane_of["marks"].append({**mark, "text": found.headline, "violation": number})
    return [lanes[key] for key in sorted(lanes)]


def _term(term: TermEvidence) -> list[Any]:
    """As `timeline.js` reads it."""
    end = term.end
    cause = ordered_end(loss_reason(end)) or next(
        (cause for words, cause in ENDS if words in end.what), "ended"
    )
    why = f"{end.what}, {end.where}"
    begin, until = term.start.when.wall, max(term.start.when.wall, end.when.wall)
    return [clipped(term.name), term.token, begin, until, cause, clipped(why, 500), True]
