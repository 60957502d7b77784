"""The past terms of an election, from audit logs. Imports the evidence and the model."""

from __future__ import annotations

import os
from collections.abc import Iterable

from doyen.audit.evidence import Evidence, EvidenceFact, LeaseFacts, read
from doyen.model import Kind, PastTerm

__all__ = ["loss_reason", "past_terms"]


def past_terms(
    paths: Iterable[str | os.PathLike[str]], election: str, kind: Kind = "elections"
) -> list[PastTerm]:
    """The terms of an election, the newest first. Raises `ConfigError` if a log cannot be read."""
    evidence = Evidence()
    for line in read(paths):
        evidence.add(line)
    terms = {}
    for key, begun in evidence.begun.items():
        if key[:2] != (kind, election):
            continue
        first = begun[0]
        term = PastTerm(first.name, key[2], first.start.when.wall)
        lost, resigned = evidence.lost.get(key), evidence.resigned.get(key)
        if lost:
            reason = loss_reason(lost[0])
            term = PastTerm(term.name, term.token, term.since, lost[0].when.wall, "lost", reason)
        elif resigned:
            term = PastTerm(term.name, term.token, term.since, resigned[0].when.wall, "resigned")
        else:
            end = _lease_end(evidence.leases[first.lease])
            if end is not None:
                term = PastTerm(
                    term.name, term.token, term.since, end.when.wall, "lost", _cause(end)
                )
        terms[term.token] = term
    return sorted(terms.values(), key=lambda term: -term.token)


def loss_reason(lost: EvidenceFact) -> str:
    """The reason that an audit log states for a loss; empty if it states none, or if the fact is
    not a loss."""
    if not lost.what.startswith("lost ("):
        return ""
    reason = lost.what.removeprefix("lost (").removesuffix(")")
    return "" if reason == "None" else reason


def _lease_end(lease: LeaseFacts) -> EvidenceFact | None:
    """How the lease of a term without an end of its own ended, if that is known."""
    if lease.died:
        return lease.died[0][1]
    return lease.given_up or lease.expired


def _cause(end: EvidenceFact) -> str:
    if end.what.startswith("found died"):
        return "its process died"
    return "its lease expired" if end.what.startswith("found expired") else end.what
