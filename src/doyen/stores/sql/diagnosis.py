"""What a database server's settings mean for elections. Pure: facts in, findings out.

Imports the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from doyen.model import Finding

__all__ = ["findings_of_mysql", "findings_of_postgresql"]


def findings_of_postgresql(
    *,
    version: str,
    connections: int,
    pooled: bool,
    poll_s: float | None,
    fsync: bool,
    full_page_writes: bool,
    timelines: bool,
    lagging_standbys: int,
) -> Iterator[Finding]:
    """What the state of a PostgreSQL server means for elections. `lagging_standbys` counts standbys
    that may lack confirmed commits."""
    subject = "postgresql"
    yield Finding.ok(subject, f"PostgreSQL {version}, {connections} connections of doyen")
    if poll_s is None:
        yield Finding.ok("changes", "changes are notified by LISTEN")
    else:
        why = "the connection goes through a pooler, so " if pooled else ""
        yield Finding.note(
            "changes",
            f"{why}changes are asked for every {poll_s * 1000:g} ms",
            "add listen=postgresql://... with the server's own address",
        )
    if not fsync:
        yield _not_durable(subject, "fsync is off", "set fsync = on")
    elif not full_page_writes:
        yield _not_durable(subject, "full_page_writes is off", "set full_page_writes = on")
    if lagging_standbys:
        counted = "a standby" if lagging_standbys == 1 else f"{lagging_standbys} standbys"
        tokens = (
            "tokens still grow, so fenced resources are safe"
            if timelines
            else "tokens may be given out twice"
        )
        yield Finding.warning(
            "replication",
            f"{counted} may lack the last commits: after a failover a leader record can be"
            f" lost while its leader is still valid; {tokens}",
            "replicate synchronously (synchronous_standby_names)"
            + ("" if timelines else ", or set token_floor after a failover"),
        )


def findings_of_mysql(
    *, version: str, poll_s: float, flush_log: int, sync_binary_log: int | None, galera: bool
) -> Iterator[Finding]:
    """What the state of a server of MySQL or MariaDB means for elections. `sync_binary_log` is None
    if it keeps no binary log."""
    subject = "mysql"
    yield Finding.ok(subject, version)
    yield Finding.ok(
        "changes", f"while something is watched, changes are asked for every {poll_s * 1000:g} ms"
    )
    if flush_log != 1:
        name = "innodb_flush_log_at_trx_commit"
        yield _not_durable(subject, f"{name} is {flush_log}", f"set {name} = 1")
    if sync_binary_log not in (None, 1):
        yield Finding.note(
            "replication",
            f"sync_binlog is {sync_binary_log}: after a crash of the machine, replicas"
            " may lack the last commits",
            "set sync_binlog = 1",
        )
    if galera:
        yield Finding.note(
            "replication",
            "this is a Galera cluster: certification prevents conflicting records, but a read"
            " at one member may lag behind a write at another",
            "let all candidates use one node first (list the others after it in the URL)",
        )


def _not_durable(subject: str, what: str, remedy: str) -> Finding:
    return Finding.warning(
        subject,
        f"{what}: after a crash of the machine, confirmed writes may be lost, among them a"
        " leader record or a renewal",
        remedy,
    )
