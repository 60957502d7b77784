"""The pages that a node serves over HTTP, for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from doyen.metrics.histogram import Histogram
from doyen.metrics.prometheus import counter, gauge, histogram
from doyen.quorum.consensus.core import Role
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.listener import Page
from doyen.quorum.node.service import Service
from doyen.quorum.protocol.connection import ConnectionErrors

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format."""


AGAIN_S = 0.2
"""For how long rendered metrics are served again. The node renders them between its other work, so
the cost must not grow with the number of requests."""


def pages(
    driver: Driver,
    service: Service,
    errors: ConnectionErrors,
    syncs: Histogram,
    round_trips: Mapping[str, Histogram],
) -> dict[str, Page]:
    """Each page by its path."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeMetrics(driver, service, errors, syncs, round_trips))

    rendered, due_at = b"", 0.0

    def metrics() -> tuple[int, str, bytes]:
        nonlocal rendered, due_at
        now = asyncio.get_running_loop().time()
        if now >= due_at:
            rendered, due_at = generate_latest(registry), now + AGAIN_S
        return 200, TEXT, rendered

    def text(status: int, words: str) -> tuple[int, str, bytes]:
        return status, "text/plain; charset=utf-8", f"{words}\n".encode()

    def ready() -> tuple[int, str, bytes]:
        known = service.serving and driver.leader is not None
        return text(200 if known else 503, "ready" if known else "no leader is known")

    def leader() -> tuple[int, str, bytes]:
        leads = driver.role is Role.LEADING
        return text(200 if leads else 503, driver.leader or "no leader is known")

    return {
        "/healthz": lambda: text(200, "ok"),
        "/readyz": ready,
        "/leader": leader,
        "/metrics": metrics,
    }


class NodeMetrics(Collector):
    """The metrics of one node, collected when Prometheus asks."""

    def __init__(
        self,
        driver: Driver,
        service: Service,
        errors: ConnectionErrors,
        syncs: Histogram,
        round_trips: Mapping[str, Histogram],
    ) -> None:
        self._driver = driver
        self._service = service
        self._errors = errors
        self._syncs = syncs
        self._round_trips = round_trips
        self._leader, self._changes = driver.leader, 0
        driver.observe_role(self._role_changed)

    def _role_changed(self, role: Role, generation: int, leader: str | None) -> None:
        if leader is not None and leader != self._leader:
            self._leader, self._changes = leader, self._changes + 1

    def collect(self) -> Iterator[Metric]:
        for name, (value, meaning) in self._gauges().items():
            yield gauge(f"doyen_node_{name}", meaning, (), {(): int(value)})
        yield counter(
            "doyen_node_leader_changes", "Changes of leader seen.", (), {(): self._changes}
        )
        faults = sorted(self._errors.counts.items(), key=lambda item: str(item[0]))
        yield counter(
            "doyen_node_connection_faults",
            "Connections that were at fault, by how.",
            ("kind",),
            {(str(getattr(fault, "name", fault)).lower(),): count for fault, count in faults},
        )
        yield histogram(
            "doyen_node_fsync_seconds", "How long syncs of the log to disk took.", self._syncs
        )
        yield histogram(
            "doyen_node_commit_seconds",
            "How long entries that this node proposed as leader took to be committed and applied.",
            self._driver.proposals.commits,
        )
        yield histogram(
            "doyen_node_peer_round_trip_seconds",
            "How long pings to a peer took to be answered.",
            Histogram(),
            ("peer",),
            {(peer,): seen for peer, seen in sorted(self._round_trips.items())},
        )

    def _gauges(self) -> dict[str, tuple[int, str]]:
        status, condition = self._driver.status(), self._service.condition()
        return {
            "leading": (status.role is Role.LEADING, "Whether this node leads."),
            "leader_known": (status.leader is not None, "Whether this node knows a leader."),
            "generation": (status.generation, "The generation this node is in."),
            "commit_index": (status.commit, "The last log index known to be committed."),
            "applied_index": (status.applied, "The last log index applied to the state machine."),
            "snapshot_index": (status.snapshot, "The last log index that a snapshot replaces."),
            "proposals_pending": (status.pending, "Proposals whose outcome is not known yet."),
            "disk_full": (status.full, "Whether the disk has no room for more proposals."),
            "disk_free_bytes": (condition.disk_free, "Bytes that are free on the disk of the log."),
            "disk_bytes": (condition.disk_bytes, "The size of the disk of the log."),
            "voters": (len(status.membership.voters), "Members that vote."),
            "learners": (len(status.membership.learners), "Members that do not vote."),
            "clients": (condition.clients, "Connections of clients."),
            "watches": (condition.watches, "Watches of clients."),
            "keys": (condition.keys, "Entries in the keyspace."),
            "leases": (condition.leases, "Leases that have not ended."),
            "keyspace_bytes": (
                condition.bytes,
                "The size of the keyspace, as its quota counts it.",
            ),
            "keyspace_quota_bytes": (condition.quota, "The size limit of the keyspace."),
            "keyspace_alarm": (
                condition.alarm,
                "Whether writes were refused because of the quota.",
            ),
            "state_version": (condition.state, "The version of the replicated state."),
            "revision": (
                condition.revision,
                "The revision of the keyspace, of which tokens are taken.",
            ),
        }
