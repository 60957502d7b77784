"""The pages that a node serves over HTTP, for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from doyen.quorum.consensus.core import Role
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.listener import Page
from doyen.quorum.node.service import Service
from doyen.quorum.protocol.connection import ConnectionErrors


def pages(driver: Driver, service: Service, errors: ConnectionErrors) -> dict[str, Page]:
    """Each page by its path."""
    last, changes = driver.leader, 0

    def role_changed(role: Role, generation: int, leader: str | None) -> None:
        nonlocal last, changes
        if leader is not None and leader != last:
            last, changes = leader, changes + 1

    driver.on_role(role_changed)

    def text(status: int, words: str) -> tuple[int, str, bytes]:
        return status, "text/plain; charset=utf-8", f"{words}\n".encode()

    def ready() -> tuple[int, str, bytes]:
        known = service.serving and driver.leader is not None
        return text(200 if known else 503, "ready" if known else "no leader is known")

    def leader() -> tuple[int, str, bytes]:
        leads = driver.role is Role.LEADING
        return text(200 if leads else 503, driver.leader or "no leader is known")

    def metrics() -> tuple[int, str, bytes]:
        lines = _metrics(driver, service, errors, changes)
        return 200, "text/plain; version=0.0.4; charset=utf-8", "".join(lines).encode()

    return {
        "/healthz": lambda: text(200, "ok"),
        "/readyz": ready,
        "/leader": leader,
        "/metrics": metrics,
    }


def _metrics(
    driver: Driver, service: Service, errors: ConnectionErrors, leaders: int
) -> Iterator[str]:
    status, condition = driver.status(), service.condition()
    gauges: dict[str, tuple[int, str]] = {
        "leading": (status.role is Role.LEADING, "Whether this node leads."),
        "leader_known": (status.leader is not None, "Whether this node knows a leader."),
        "generation": (status.generation, "The generation this node is in."),
        "commit_index": (status.commit, "The last log index known to be committed."),
        "applied_index": (status.applied, "The last log index applied to the state machine."),
        "snapshot_index": (status.snapshot, "The last log index that a snapshot replaces."),
        "proposals_pending": (status.pending, "Proposals whose outcome is not known yet."),
        "disk_full": (status.full, "Whether the disk has no room for more proposals."),
        "voters": (len(status.membership.voters), "Members that vote."),
        "learners": (len(status.membership.learners), "Members that do not vote."),
        "clients": (condition.clients, "Connections of clients."),
        "watches": (condition.watches, "Watches of clients."),
        "keys": (condition.keys, "Entries in the keyspace."),
        "leases": (condition.leases, "Leases that have not ended."),
        "keyspace_bytes": (condition.bytes, "The size of the keyspace, as its quota counts it."),
        "keyspace_quota_bytes": (condition.quota, "The size limit of the keyspace."),
        "keyspace_alarm": (condition.alarm, "Whether writes were refused because of the quota."),
        "state_version": (condition.state, "The version of the replicated state."),
        "revision": (
            condition.revision,
            "The revision of the keyspace, of which tokens are taken.",
        ),
    }
    for name, (value, meaning) in gauges.items():
        yield f"# HELP doyen_node_{name} {meaning}\n# TYPE doyen_node_{name} gauge\n"
        yield f"doyen_node_{name} {int(value)}\n"
    yield "# HELP doyen_node_leader_changes_total Changes of leader seen.\n"
    yield "# TYPE doyen_node_leader_changes_total counter\n"
    yield f"doyen_node_leader_changes_total {leaders}\n"
    yield "# HELP doyen_node_connection_faults_total Connections that were at fault, by how.\n"
    yield "# TYPE doyen_node_connection_faults_total counter\n"
    for fault, count in sorted(errors.counts.items(), key=lambda item: str(item[0])):
        name = str(getattr(fault, "name", fault)).lower()
        yield f'doyen_node_connection_faults_total{{kind="{name}"}} {count}\n'
