"""Versions of the replicated state: what the nodes of a cluster may put into its log.

Every node applies the same log, so a command, or a new meaning of a known command, may enter the
log only when every member understands it. The cluster therefore has a version, kept in the
replicated state. Each node sends the versions it supports in its handshake. The leader raises the
cluster's version when all members are connected and support a newer one. A member that is down
counts as one that supports `IDENTIFIED` if its member id is recorded, and otherwise as one that
supports nothing newer. From then on, nodes that do not support it are refused as peers.

    1   the first release
    2   leases end in slices; results of any size are remembered; a quota on the keyspace;
        snapshots carry the history of changes and unfinished ends of leases; results do not carry
        large values
    3   updates of entries that are bound to a lease
    4   the etcd keyspace

Imports nothing.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ETCD", "FIRST", "IDENTIFIED", "NEWEST", "OLDEST", "UPDATES"]

FIRST: Final = 1
"""The version of a new cluster, and of a node whose handshake names none."""
OLDEST: Final = 1
IDENTIFIED: Final = 2
"""The version that every release with member ids supports (see `node.membership`)."""
UPDATES: Final = 3
"""The version from which on `Update` may enter the log."""
ETCD: Final = 4
"""The version from which on requests to the etcd keyspace may enter the log."""
NEWEST: Final = 4
"""This release supports the versions from `OLDEST` to `NEWEST`."""
