"""`doyen history ELECTION`: the past terms of an election, from the store or from audit logs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from doyen.audit.history import past_terms
from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    Table,
    add_election_arguments,
    add_option,
    console,
    duration,
    kind_of,
    print_json,
    printable,
    store_url,
)
from doyen.cli._screen import View, print_view
from doyen.cli.list import when
from doyen.errors import ConfigError
from doyen.events.reasons import loss_cause
from doyen.model import PastTerm

MANUAL = """\
Shows who has led an election, since when and until when, how each term ended, and how long there
was no leader before it, the newest term first. Leaders record their last 50 terms in the store,
with the time of their own clock. A leader that was killed could not record its end; it had ended
before the next term began.

With --audit the terms are read from audit logs instead, which have all of them, and those of locks.

exit codes:
  0    there are terms
  1    there are none
  others as for every command: see doyen --help

examples:
  doyen history billing
  # from audit logs
  doyen history billing --audit host1.jsonl --audit host2.jsonl
  # for how long each led, for a script
  doyen history billing --json | jq '.terms[] | .until - .since'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)
    add_option(
        parser,
        "--audit FILE",
        "read this audit log instead; may be repeated (default: none)",
        action="append",
        dest="audit",
    )


def run(args: argparse.Namespace) -> int:
    kind = kind_of(args)
    if args.audit:
        terms = past_terms(args.audit, args.election, kind)
    elif kind != "elections":
        raise ConfigError("terms of locks are not recorded in the store: read them with --audit")
    else:
        with connect_blocking(store_url(args, create=False), create=False) as session:
            terms = session.history(args.election)
    if args.json:
        print_json({"election": args.election, "kind": kind, "terms": as_dicts(terms)})
    else:
        print_view(console(), view(args.election, terms))
    return Exit.DONE if terms else Exit.NO


def _gap_s(term: PastTerm, before: PastTerm | None) -> float | None:
    """How long there was no leader before a term, if that is known."""
    if before is None or before.until is None:
        return None
    return max(0.0, term.since - before.until)


def as_dicts(terms: Sequence[PastTerm]) -> list[dict[str, Any]]:
    """The terms for programs."""
    return [
        {
            "name": term.name,
            "token": term.token,
            "since": term.since,
            "until": term.until,
            "end": term.end or None,
            "reason": term.reason,
            "leads": term.leads,
            "gap_s": _gap_s(term, before),
        }
        for term, before in _with_before(terms)
    ]


def _with_before(terms: Sequence[PastTerm]) -> list[tuple[PastTerm, PastTerm | None]]:
    return [*zip(terms, [*terms[1:], None], strict=True)]


def view(election: str, terms: Sequence[PastTerm]) -> View:
    """The terms as text."""
    if not terms:
        return View(f"{printable(election)} has no recorded terms")
    table = Table(["leader", ">token", "since", "until", ">lasted", ">gap before", "end"])
    for term, before in _with_before(terms):
        gap_s = _gap_s(term, before)
        table.rows.append(
            [
                printable(term.name),
                str(term.token),
                when(term.since),
                when(term.until),
                "" if term.until is None else duration(term.until - term.since),
                "" if gap_s is None else duration(gap_s),
                _end(term),
            ]
        )
        if term.leads:
            table.styles[len(table.rows) - 1] = "bold green"
        elif _shown_end(term) == "lost":
            table.styles[len(table.rows) - 1] = "yellow"
    count = "1 term" if len(terms) == 1 else f"{len(terms)} terms"
    return View(f"{printable(election)}: {count}", [table])


def _end(term: PastTerm) -> str:
    if term.leads:
        return "leads"
    if not term.end:
        return "not recorded"
    end = _shown_end(term)
    return f"{end}: {printable(term.reason)}" if term.reason else end


def _shown_end(term: PastTerm) -> str:
    """An order ends the body as a loss does, but it was planned."""
    planned = loss_cause(term.reason) in ("ordered", "transferred")
    return "resigned" if planned else term.end
