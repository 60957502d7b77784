"""The watches of a node's clients, served from what this node has applied.

A watch of one key may ask for its entry. A notification then carries it, so that a hundred clients
that follow one document do not all send a read at the same time. It is left out if it is large, if
the notification would become large, or if the client takes its answers slowly: then the client
reads.

If a notification cannot be sent, the client's connection ends. The client resumes its watches from
the last notification that it has received, so it misses nothing, and the others are notified.

A watch that is resumed names the revision up to which it was notified. It is notified of anything
later before it is confirmed: if the connection broke in between, the client would otherwise take a
confirmed watch for one that has missed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from doyen.errors import DoyenError
from doyen.events.log_lines import log_line
from doyen.quorum.keyspace.commands import StoredEntry
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.clients import PIECE, ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.protocol.requests import (
    MAX_KEY,
    CancelWatch,
    ErrorCode,
    WatchConfirmed,
    WatchNotification,
    WatchRequest,
)

log = logging.getLogger("doyen.quorum.node")

WATCHES = 100_000
"""How many watches one connection may have."""

CARRIED = 4096
"""How many bytes the value of an entry may have that notifications carry. All watches of a key are
notified at the same time, and each connection buffers a copy."""
BESIDE = 64
"""What an entry takes in a notification apart from key and value, in bytes; not less than that."""

Watchers = dict[tuple[ServedClient, int], bool]


class Watches:
    """All watches on one node."""

    def __init__(self, driver: Driver, keyspace: Keyspace) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._watchers: dict[str, Watchers] = {}
        """Client and id of each watch, and whether it wants the entry, by scope."""
        self._count = 0
        self._notified = keyspace.revision
        """The revision up to which all confirmed watches have been notified."""
        driver.on_applied(self.notify)

    def __len__(self) -> int:
        return self._count  # it is a part of every status, and there may be very many scopes

    def add(self, client: ServedClient, request: WatchRequest) -> None:
        if request.id in client.watches:
            return
        if len(client.watches) >= WATCHES:
            text = f"one connection may have {WATCHES} watches; open another store"
            client.fail(request.id, ErrorCode.UNUSABLE, text)
            return
        if len(request.scope) > MAX_KEY:
            text = f"a scope has at most {MAX_KEY} characters, not {len(request.scope)}"
            client.fail(request.id, ErrorCode.UNUSABLE, text)
            return
        self.notify()
        client.watches[request.id] = request.scope
        self._watchers.setdefault(request.scope, {})[client, request.id] = request.entry
        self._count += 1
        if request.since <= self._keyspace.revision:
            self._confirm(client, request)
            return
        try:
            self._driver.when_current(partial(self._confirm, client, request))
        except DoyenError:
            client.connection.close()  # this node is stopping: the client goes to another

    def _confirm(self, client: ServedClient, request: WatchRequest) -> None:
        if client.connection.closed or request.id not in client.watches:
            return
        self.notify()
        if request.since >= 0 and self._missed(request):
            client.send(WatchNotification([request.id], self._notified))
        client.send(WatchConfirmed(request.id, self._notified))

    def _missed(self, request: WatchRequest) -> bool:
        """Whether anything in a watch's scope changed, or may have changed, after its position. A
        position that this cluster has not reached, or of another cluster, says nothing about the
        history here."""
        keyspace, ours = self._keyspace, self._driver.status().membership.cluster
        return (
            (bool(ours and request.cluster) and request.cluster != ours)
            or request.since > keyspace.revision
            or keyspace.history.changed(request.scope, request.since)
        )

    def remove(self, client: ServedClient, request: CancelWatch) -> None:
        self._remove(client, request.id)

    def remove_all(self, client: ServedClient) -> None:
        """The client's connection has ended."""
        for watch in [*client.watches]:
            self._remove(client, watch)

    def _remove(self, client: ServedClient, watch: int) -> None:
        scope = client.watches.pop(watch, None)
        if scope is not None:
            watchers = self._watchers[scope]
            del watchers[client, watch]
            self._count -= 1
            if not watchers:
                del self._watchers[scope]

    def notify(self, index: int = 0) -> None:
        """Notify watches of what has changed since this was last called."""
        since, self._notified = self._notified, self._keyspace.revision
        if since == self._notified or not self._watchers:
            return
        keys = self._keyspace.history.latest(since)
        if keys is None or since > self._notified:
            scopes = [*self._watchers]
        else:
            scopes = [*_scopes(keys, self._watchers)]
        changed: dict[ServedClient, list[int]] = {}
        carried: dict[ServedClient, dict[int, StoredEntry]] = {}
        taken: dict[ServedClient, int] = {}
        for scope in scopes:
            found, size = self._keyspace.get(scope), 0
            if found is not None:
                size = len(found.key) + len(found.value) + BESIDE
                if len(found.value) > CARRIED:
                    found = None
            for (client, watch), wants in self._watchers[scope].items():
                changed.setdefault(client, []).append(watch)
                if wants and found is not None and not client.connection.congested:
                    taken[client] = carrying = taken.get(client, 0) + size
                    if carrying <= PIECE:
                        carried.setdefault(client, {})[watch] = found
        for client, watches in changed.items():
            self._notify(client, watches, carried.get(client, {}))

    def _notify(
        self, client: ServedClient, watches: list[int], entries: dict[int, StoredEntry]
    ) -> None:
        try:
            client.send(WatchNotification(watches, self._notified, entries))
        except Exception:
            # The caller may be another client's request, and the rest is not notified again.
            log.exception(log_line(event="callback_failed"))
            client.connection.abort()


def _scopes(keys: Iterable[str], watched: dict[str, Watchers]) -> dict[str, None]:
    """The watched scopes that these keys are at or below."""
    seen: set[str] = set()
    found: dict[str, None] = {}
    for key in keys:
        scope = key
        while scope and scope not in seen:
            seen.add(scope)
            if scope in watched:
                found[scope] = None
            scope = scope.rpartition("/")[0]
    return found
