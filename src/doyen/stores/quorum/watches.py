"""The watches of a client, which outlive its connections.

Each watch is requested again on every connection, from its own position: the revision up to which
it has been notified of all changes. The node notifies it of what was missed, then confirms it. A
confirmed watch shares in the position that the node sends with every notification. Imports the
quorum's protocol, the stores' kit and the error tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from doyen.errors import StoreError
from doyen.quorum.keyspace.commands import encode
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.requests import (
    REQUEST,
    WatchConfirmed,
    WatchNotification,
    WatchRequest,
)
from doyen.stores.kit.lifecycle import WatchHandle

__all__ = ["QuorumWatch", "WatchTable"]

log = logging.getLogger("doyen")


class QuorumWatch(WatchHandle):
    """One watch of a scope."""

    def __init__(
        self,
        number: int,
        scope: str,
        notify: Callable[[], None],
        on_close: Callable[[QuorumWatch], None],
    ) -> None:
        super().__init__(scope, notify, on_close)
        self.id = number
        self.position = -1
        """It was notified of all changes up to this revision; negative before it is confirmed."""
        self.confirmed = False
        """Whether the current connection has confirmed it."""


class WatchTable:
    """The open watches by id, and their common position on the current connection."""

    def __init__(self) -> None:
        self.open: dict[int, QuorumWatch] = {}
        self.notified = 0
        """All watches that the current connection has confirmed were notified of all changes up to
        this revision."""

    def resume(self, connection: FrameConnection, cluster_id: str) -> None:
        """Request all watches on a new connection."""
        self.notified = 0
        for watch in self.open.values():
            request = WatchRequest(watch.id, watch.scope, watch.position, cluster_id)
            connection.send(REQUEST, encode(request))

    def disconnected(self) -> None:
        for watch in self.open.values():
            if watch.confirmed:
                watch.position = max(watch.position, self.notified)
                watch.confirmed = False

    def changed(self, notification: WatchNotification) -> None:
        self.notified = notification.revision
        for number in notification.ids:
            watch = self.open.get(number)
            if watch is not None:
                watch.notify_soon()

    def confirm(self, response: WatchConfirmed, connection: FrameConnection | None) -> None:
        watch = self.open.get(response.id)
        if watch is None:
            return
        watch.position, watch.confirmed = response.revision, True
        if not watch.begun.done():
            watch.begun.set_result(None)
        elif connection is not None and connection.supports[1] == FIRST:
            # A node of the first release confirms before it notifies of what was missed, and the
            # connection may break in between.
            watch.notify_soon()

    def refuse(self, number: int, error: StoreError) -> None:
        """The node cannot serve this watch."""
        watch = self.open.get(number)
        if watch is None:
            return
        if watch.begun.done():
            log.warning("the watch on %s could not be resumed: %s", watch.scope, error)
        watch.fail(error)

    def fail_new(self, error: StoreError) -> None:
        """Fail the watches that have not begun."""
        for watch in [*self.open.values()]:
            watch.fail(type(error)(str(error)))
