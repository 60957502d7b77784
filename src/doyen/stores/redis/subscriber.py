"""The connection on which notifications of changes arrive.

Every watched scope is a channel, subscribed to before the watch begins. A message names the scope
and nothing else. After a new connection was made, all scopes are subscribed to again and notified,
because changes in between may have been missed. A connection is replaced if it does not respond to
a PING, or if another server has become the master.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from doyen._waiting import retrieve, shared
from doyen.errors import StoreError, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.stores.kit.lifecycle import CLOSED, begun_again
from doyen.stores.redis.connection import RedisConnection, RedisMaster

log = logging.getLogger("doyen")

_PING_S = 2.0
_SILENT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_AT_ONCE = 500
"""How many channels are subscribed to in one command."""


class RedisSubscriber:
    """Subscriptions to scopes. `changed` is called with each scope that has changed."""

    def __init__(self, master: RedisMaster, prefix: str, changed: Callable[[str], None]) -> None:
        self._master = master
        self._channels = f"{prefix}at:"
        self._changed = changed
        self._wanted: Counter[str] = Counter()
        """How many watches each scope has."""
        self._subscribed: set[str] = set()
        """Scopes that the server has confirmed on the present connection."""
        self._resubscribed: set[str] = set()
        """Scopes that were subscribed to on an earlier connection, and not yet on this one."""
        self._confirmations: dict[str, asyncio.Future[None]] = {}
        self._outbox: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()
        """Commands to send, in order; None after the connection has ended."""
        self._running: asyncio.Task[None] | None = None

    async def subscribe(self, scope: str) -> None:
        """Wait until changes of the scope are notified."""
        loop = asyncio.get_running_loop()
        self._wanted[scope] += 1
        try:
            if self._running is None:
                self._running = loop.create_task(begun_again(self._run, "subscriptions"))
            if scope in self._subscribed:
                return
            if scope not in self._confirmations:
                self._confirmations[scope] = loop.create_future()
                self._post("SUBSCRIBE", scope)
            await shared(self._confirmations[scope])
        except BaseException:
            self.unsubscribe(scope)
            raise

    def unsubscribe(self, scope: str) -> None:
        """Undo one `subscribe`. The channel is left with the last of them."""
        self._wanted[scope] -= 1
        if not self._wanted[scope]:
            del self._wanted[scope]
            self._resubscribed.discard(scope)
            if scope in self._subscribed:
                self._subscribed.discard(scope)
                self._post("UNSUBSCRIBE", scope)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._fail(StoreUnusable(CLOSED))

    def _post(self, verb: str, scope: str) -> None:
        self._outbox.put_nowait((verb, self._channels + scope))

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                connection = await self._master.connect()
            except StoreError as error:
                log.debug("%s", log_line(event="watch_connection_failed", reason=error))
                self._fail(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            connection.on_push = self._receive
            self._resubscribe(connection)
            try:
                await self._send_until_ended(connection)
            except RedisError as error:
                log.debug("%s", log_line(event="watch_connection_lost", reason=error))
            finally:
                self._resubscribed |= self._subscribed
                self._subscribed.clear()
                await connection.close()

    def _resubscribe(self, connection: RedisConnection) -> None:
        """Replace the outbox by subscriptions to all wanted scopes."""
        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()
        self._outbox = outbox
        connection.ended.add_done_callback(lambda _: outbox.put_nowait(None))
        scopes = list(self._wanted)
        for scope in [scope for scope in self._confirmations if scope not in self._wanted]:
            self._confirmations.pop(scope).cancel()
        for scope in scopes:
            self._confirmations.setdefault(scope, loop.create_future())
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            outbox.put_nowait(("SUBSCRIBE", *(self._channels + scope for scope in some)))

    async def _send_until_ended(self, connection: RedisConnection) -> None:
        """Send commands, and a PING when there are none, until the connection ends."""
        loop = asyncio.get_running_loop()
        connection.received_at = loop.time()
        while True:
            command: Sequence[str] | None = ("PING",)
            try:
                async with asyncio.timeout(_PING_S):
                    command = await self._outbox.get()
            except TimeoutError:
                if connection.run != self._master.run:
                    return
                if loop.time() - connection.received_at > _SILENT_S:
                    line = log_line(
                        event="watch_connection_silent",
                        server=connection.host,
                        silent_s=_SILENT_S,
                    )
                    log.debug("%s", line)
                    return
            if command is None:
                return
            await connection.post(command)

    def _receive(self, message: Any) -> None:
        if isinstance(message, Exception):
            self._fail(StoreUnusable(f"doyen may not subscribe to {self._channels}*: {message}"))
        elif isinstance(message, list) and message[0] in (b"message", b"subscribe"):
            scope = message[1].decode().removeprefix(self._channels)
            if message[0] == b"message":
                self._changed(scope)
            else:
                self._confirm(scope)

    def _confirm(self, scope: str) -> None:
        confirmation = self._confirmations.pop(scope, None)
        if confirmation is not None and not confirmation.done():
            confirmation.set_result(None)
        if scope not in self._wanted:
            self._post("UNSUBSCRIBE", scope)
            return
        self._subscribed.add(scope)
        if scope in self._resubscribed:
            self._resubscribed.discard(scope)
            self._changed(scope)

    def _fail(self, error: StoreError) -> None:
        """Fail all calls of `subscribe` that are waiting."""
        confirmations, self._confirmations = self._confirmations, {}
        for confirmation in confirmations.values():
            if not confirmation.done():
                confirmation.set_exception(error)
                retrieve(confirmation)
