"""Notification: one Watch stream for all watches of a store, on a channel of its own.

Watches begin at the present and request no history. A watch that was interrupted (the stream ended,
or its member fell behind a compaction) is created again and then notified as if something had
changed. So no position has to be kept, and a compaction cannot hide the final state.

- etcd answers creation requests in their order; the response has the id that events carry.
- On a stream without traffic, progress is requested. If that is not answered either, the stream is
  given up: a frozen or partitioned member must not leave candidates waiting. The time for each, and
  for opening a stream, is a third of the shortest ttl that was granted, since a successor should
  not wait much longer than the ttl.
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
from doyen.events.log_lines import log_line
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import (
    Denied,
    EtcdChannel,
    EtcdClient,
    EtcdCluster,
    LoginExpired,
    refusal,
)
from doyen.stores.kit.failover import answer_within
from doyen.stores.kit.lifecycle import WatchHandle, begun_again

PROBE_S = 2.0
"""How long a stream may be silent before progress is requested, and how long that may take, unless
a third of the ttl is shorter."""
PAUSE_S = 0.2
"""Between two attempts to open a stream, plus or minus a half."""

FRESH_S = 10.0
"""A token that was issued within this time is not the reason why a watch is denied."""

log = logging.getLogger("doyen")


class EtcdWatches:
    """The watches of one store."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._login = cluster.login
        self._client = EtcdClient(cluster)
        self._all: dict[WatchHandle, None] = {}
        self._stream: _WatchStream | None = None
        self._running: asyncio.Task[None] | None = None
        self._probe_s = PROBE_S
        self._connect_s = cluster.connect_timeout_s
        self._fresh_until = -math.inf
        """Until then, the token was issued too recently to be stale."""

    def granted(self, ttl_s: float) -> None:
        """Take notice of a lease: a dead stream must be noticed within a share of its ttl."""
        self._probe_s = min(self._probe_s, ttl_s / 3)
        self._connect_s = min(self._connect_s, ttl_s / 3)
        if self._stream is not None:
            self._stream.probe_s = self._probe_s

    async def watch(self, scope: str, notify: Callable[[], None]) -> WatchHandle:
        """Call `notify` after changes; returns when the watch has begun."""
        watch = WatchHandle(scope, notify, self._forget)
        self._all[watch] = None
        if self._running is None or self._running.done():
            work = begun_again(self._run, "watch stream")
            self._running = asyncio.get_running_loop().create_task(work)
        elif self._stream is not None:
            self._stream.create(watch)
        await watch.wait_begun()
        return watch

    def _forget(self, watch: WatchHandle) -> None:
        self._all.pop(watch, None)
        if self._stream is not None:
            self._stream.cancel(watch)

    async def close(self) -> None:
        for watch in list(self._all):
            watch.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._client.close()

    async def _run(self) -> None:
        """Keep a stream open for as long as there are watches."""
        while self._all:
            try:
                async with answer_within(self._connect_s, "the member of etcd for watches"):
                    channel = await self._client.channel()
                await self._serve(channel)
            except StoreError as error:
                log.debug("%s", log_line(event="watches_interrupted", reason=error))
                for watch in list(self._all):
                    watch.fail(error)
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))

    async def _serve(self, channel: EtcdChannel) -> None:
        """Watch on one stream until it fails. Returns if only a new token was needed."""
        stream = self._stream = _WatchStream(channel, self._probe_s)
        for watch in self._all:
            stream.create(watch)
        token = self._login.token
        try:
            await stream.read()
        except (LoginExpired, Denied) as error:
            # For a watch with a stale token, etcd before 3.5.6 answers "permission denied".
            now = asyncio.get_running_loop().time()
            denied = isinstance(error, Denied) and now < self._fresh_until
            if denied or not self._login.user:
                raise
            await self._login.authenticate(channel, stale=token)
            self._fresh_until = now + FRESH_S
        finally:
            self._stream = None
            stream.end()
            self._client.move_on(channel)


class _WatchStream:
    """One Watch stream, from its opening to its end."""

    def __init__(self, channel: EtcdChannel, probe_s: float) -> None:
        self.probe_s = probe_s
        """How long the stream may be silent before progress is requested, and how long that may
        take."""
        self._member = channel.member
        self._stream = channel.stream(rpc.WATCH)
        self._creating: deque[WatchHandle] = deque()
        self._ids: dict[WatchHandle, int] = {}
        self._watches: dict[int, WatchHandle] = {}

    def create(self, watch: WatchHandle) -> None:
        self._creating.append(watch)
        scope = watch.scope.encode()
        # The scope and all keys below it, and few others: "0" follows "/".
        request = {"key": scope, "range_end": scope + b"0", "fragment": True}
        self._stream.send(rpc.WatchRequest(create_request=request))

    def cancel(self, watch: WatchHandle) -> None:
        number = self._ids.pop(watch, None)
        if number is not None:
            del self._watches[number]
            self._stream.send(rpc.WatchRequest(cancel_request={"watch_id": number}))

    async def read(self) -> NoReturn:
        """Process responses until the stream fails, which raises."""
        reading: asyncio.Task[Any] | None = None
        probed = False
        try:
            while True:
                reading = reading or asyncio.create_task(self._stream.read())
                done, _ = await asyncio.wait({reading}, timeout=self.probe_s)
                if done:
                    answer, reading, probed = reading.result(), None, False
                    self._take(answer)
                elif probed:
                    raise StoreUnavailable(f"etcd at {self._member} does not answer")
                elif self._ids or self._creating:
                    self._stream.send(rpc.WatchRequest(progress_request={}))
                    probed = True
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
            return  # a watch that was closed meanwhile, or the response to a progress request
        if answer.canceled:
            del self._watches[self._ids.pop(watch)]
            self.create(watch)
        elif any(_concerns(watch.scope.encode(), event.kv.key) for event in answer.events):
            watch.notify()

    def _created(self, watch: WatchHandle, answer: Any) -> None:
        if answer.canceled:
            raise refusal(answer.cancel_reason, self._member)
        self._watches[answer.watch_id] = watch
        self._ids[watch] = answer.watch_id
        if watch.closed:
            self.cancel(watch)
        else:
            watch.begin()


def _concerns(scope: bytes, key: bytes) -> bool:
    return key == scope or key.startswith(scope + b"/")
