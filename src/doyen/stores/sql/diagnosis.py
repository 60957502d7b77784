"""What a database server's settings mean for elections. Pure: facts in, findings out.

Imports the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from doyen.model import Finding

__all__ = ["MySQLFacts", "PostgreSQLFacts", "findings_of_mysql", "findings_of_postgresql"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgreSQLFacts:
    """How a PostgreSQL server was found."""

    version: str
    pooled: bool
    poll_s: float | None
    fsync: bool
    full_page_writes: bool
    timelines: bool
    lagging_standbys: int
    """Standbys that may lack what was confirmed."""
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MySQLFacts:
    """How a server of MySQL or MariaDB was found."""

    version: str
    poll_s: float
    flush_log: int
    logs_binary: bool
    sync_binary_log: int
    galera: bool


def findings_of_postgresql(facts: PostgreSQLFacts) -> Iterator[Finding]:
    """What the state of a PostgreSQL server means."""
    subject = "postgresql"
    yield Finding(
        level="ok",
        subject=subject,
        text=f"PostgreSQL {facts.version}, {facts.connections} connections of doyen in all",
    )
    if facts.poll_s is None:
        yield Finding(level="ok", subject="changes", text="changes are heard by LISTEN")
    else:
        why = "a pooler stands before the server, so " if facts.pooled else ""
        yield Finding(
            level="note",
            subject="changes",
            text=f"{why}changes are asked for every {facts.poll_s * 1000:g} ms",
            remedy="add listen=postgresql://... with the server's own address",
        )
    if not facts.fsync:
        yield _not_durable(subject, "fsync is off", "set fsync = on")
    elif not facts.full_page_writes:
        yield _not_durable(subject, "full_page_writes is off", "set full_page_writes = on")
    if facts.lagging_standbys:
        counted = (
            "a standby" if facts.lagging_standbys == 1 else f"{facts.lagging_standbys} standbys"
        )
        tokens = (
            "tokens keep growing all the same, so fenced resources are safe"
            if facts.timelines
            else "tokens may be given twice"
        )
        yield Finding(
            level="warning",
            subject="replication",
            text=f"{counted} may lack the last commits: after a failover a leader's record can be"
            f" gone while the leader still counts on it; {tokens}",
            remedy="replicate synchronously (synchronous_standby_names)"
            + ("" if facts.timelines else ", or set token_floor after a failover"),
        )


def findings_of_mysql(facts: MySQLFacts) -> Iterator[Finding]:
    """What the state of a server of MySQL or MariaDB means."""
    subject = "mysql"
    yield Finding(level="ok", subject=subject, text=facts.version)
    yield Finding(
        level="ok",
        subject="changes",
        text=f"while something is watched, changes are asked for every {facts.poll_s * 1000:g} ms",
    )
    if facts.flush_log != 1:
        name = "innodb_flush_log_at_trx_commit"
        yield _not_durable(subject, f"{name} is {facts.flush_log}", f"set {name} = 1")
    if facts.logs_binary and facts.sync_binary_log != 1:
        yield Finding(
            level="note",
            subject="replication",
            text=f"sync_binlog is {facts.sync_binary_log}: after a crash of the machine, replicas"
            " may lack the last commits",
            remedy="set sync_binlog = 1",
        )
    if facts.galera:
        yield Finding(
            level="note",
            subject="replication",
            text="this is a Galera cluster: records are kept apart by certification, but a read at"
            " one member may lag behind a write at another",
            remedy="let all candidates use one node first (list the others after it in the URL)",
        )


def _not_durable(subject: str, what: str, remedy: str) -> Finding:
    return Finding(
        level="warning",
        subject=subject,
        text=f"{what}: after a crash of the machine, what was confirmed may be gone, a leader's"
        " record or a renewal among it",
        remedy=remedy,
    )
