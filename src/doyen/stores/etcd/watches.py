"""Notification: one Watch stream for all watches of a store, on a wire of its own.

Watches begin at the present and ask for no history: whenever a watch has been broken (the stream
ended, its member fell behind a compaction), it is created again and then told, as if something had
happened. So nothing needs to be remembered, and no compaction can hide the final state.

- etcd answers requests for watches in their order; the answer names the id that events carry.
- A stream on which nothing comes is asked for its progress, and given up if that is not answered
  either: a member that was frozen, or cut off, must not leave candidates asleep.

Imports the cluster and its messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from doyen.errors import StoreError, StoreUnavailable
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import (
    Denied,
    EtcdChannel,
    EtcdCluster,
    EtcdConnection,
    LoginExpired,
    refusal,
)

__all__ = ["EtcdWatches"]

PULSE_S = 2.0
"""How long a stream may be silent before it is asked, and how long the answer may take."""
PAUSE_S = 0.2
"""Between two attempts to have a stream, give or take a half."""

FRESH_S = 10.0
"""A token that was got within this time is not the reason why a watch is denied."""

log = logging.getLogger("doyen")


class EtcdWatches:
    """The watches of one store."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._wire = EtcdConnection(cluster)
        self._all: dict[_Watch, None] = {}
        self._stream: _Stream | None = None
        self._running: asyncio.Task[None] | None = None
        self._known_until = -math.inf
        """Until then, our token was got so lately that it cannot be stale."""

    async def watch(self, scope: bytes, notify: Callable[[], None]) -> _Watch:
        """Have `notify` called; returns when the watch has begun."""
        watch = _Watch(self, scope, notify)
        self._all[watch] = None
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run())
        elif self._stream is not None:
            self._stream.create(watch)
        try:
            await watch.begun
        except BaseException:
            watch.close()
            raise
        return watch

    def forget(self, watch: _Watch) -> None:
        self._all.pop(watch, None)
        if self._stream is not None:
            self._stream.cancel(watch)

    async def close(self) -> None:
        for watch in list(self._all):
            watch.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._wire.close()

    async def _run(self) -> None:
        """Have a stream, and another when that ends, as long as there is anything to watch."""
        while self._all:
            try:
                await self._serve(await self._wire.connection())
            except StoreError as error:
                log.debug("watching is interrupted: %s", error)
                for watch in [watch for watch in self._all if not watch.begun.done()]:
                    watch.begun.set_exception(error)
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))

    async def _serve(self, connection: EtcdChannel) -> None:
        """Watch on one stream. Returns if all it took to go on was another token."""
        stream = self._stream = _Stream(connection)
        for watch in self._all:
            stream.create(watch)
        token = self._cluster.token
        try:
            await stream.read()
        except (LoginExpired, Denied) as error:
            # For a watch, etcd before 3.5.6 says "denied" when it means that the token is stale.
            now = asyncio.get_running_loop().time()
            denied = isinstance(error, Denied) and now < self._known_until
            if denied or not self._cluster.credentials.user:
                raise
            await self._cluster.authenticate(connection, stale=token)
            self._known_until = now + FRESH_S
        finally:
            self._stream = None
            stream.end()
            self._wire.move_on(connection)


class _Watch:
    """A standing request to be told of changes at a scope or under it."""

    def __init__(self, watches: EtcdWatches, scope: bytes, notify: Callable[[], None]) -> None:
        self.scope = scope
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under = scope + b"/"
        self._watches = watches
        self._notify = notify
        self.closed = False

    def concerns(self, key: bytes) -> bool:
        return key == self.scope or key.startswith(self._under)

    def tell(self) -> None:
        if not self.closed:
            try:
                self._notify()
            except Exception:
                log.exception("a listener failed on a change and was passed over")

    def begin(self) -> None:
        """It has been created; again, if it had begun before, and then what it missed is told."""
        if self.begun.done():
            self.tell()
        else:
            self.begun.set_result(None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._watches.forget(self)


class _Stream:
    """One Watch stream, from its opening to its end."""

    def __init__(self, connection: EtcdChannel) -> None:
        self._member = connection.member
        self._stream = connection.stream(rpc.WATCH)
        self._creating: deque[_Watch] = deque()
        self._ids: dict[_Watch, int] = {}
        self._watches: dict[int, _Watch] = {}

    def create(self, watch: _Watch) -> None:
        self._creating.append(watch)
        # All that begins with the scope and a slash, the scope itself, and little besides.
        wanted = {"key": watch.scope, "range_end": watch.scope + b"0", "fragment": True}
        self._stream.send(rpc.WatchRequest(create_request=wanted))

    def cancel(self, watch: _Watch) -> None:
        number = self._ids.pop(watch, None)
        if number is not None:
            del self._watches[number]
            self._stream.send(rpc.WatchRequest(cancel_request={"watch_id": number}))

    async def read(self) -> NoReturn:
        """Take what comes until the stream ends, which raises."""
        reading: asyncio.Task[Any] | None = None
        asked = False
        try:
            while True:
                reading = reading or asyncio.create_task(self._stream.read())
                done, _ = await asyncio.wait({reading}, timeout=PULSE_S)
                if done:
                    answer, reading, asked = reading.result(), None, False
                    self._take(answer)
                elif asked:
                    raise StoreUnavailable(f"etcd at {self._member} is silent")
                elif self._ids or self._creating:
                    self._stream.send(rpc.WatchRequest(progress_request={}))
                    asked = True
        finally:
            if reading is not None:
                reading.cancel()

    def end(self) -> None:
        self._stream.end()

    def _take(self, answer: Any) -> None:
        if answer.created:
            self._created(self._creating.popleft(), answer)
            return
        watch = self._watches.get(answer.watch_id)
        if watch is None:
            return  # closed meanwhile, or word of the stream's progress
        if answer.canceled:
            del self._watches[self._ids.pop(watch)]
            self.create(watch)
        elif any(watch.concerns(event.kv.key) for event in answer.events):
            watch.tell()

    def _created(self, watch: _Watch, answer: Any) -> None:
        if answer.canceled:
            raise refusal(answer.cancel_reason, self._member)
        self._watches[answer.watch_id] = watch
        self._ids[watch] = answer.watch_id
        if watch.closed:
            self.cancel(watch)
        else:
            watch.begin()
