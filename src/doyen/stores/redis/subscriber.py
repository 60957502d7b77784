"""The one connection on which changes are heard.

Every scope that somebody watches is a channel, subscribed to before the watch begins. What is heard
is a hint: it names a scope and nothing else. Whatever was subscribed to anew, on another
connection, may have changed meanwhile, and so it is told. A connection that is silent although it
was asked for a sign is given up, and so is one to a server that is no longer the one that
everything else is asked of.

Imports its own package and the standard library.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from doyen._waiting import shared
from doyen.errors import StoreError, StoreUnusable
from doyen.stores.redis.connection import RedisAddress, RedisConnection

__all__ = ["RedisSubscriber"]

log = logging.getLogger("doyen")

_PING_S = 2.0
_SILENT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_AT_ONCE = 500

_Said = Sequence[str]


class RedisSubscriber:
    """Hears what changes in the scopes that are wanted."""

    def __init__(self, address: RedisAddress, prefix: str, changed: Callable[[str], None]) -> None:
        self._address = address
        self._channels = f"{prefix}at:"
        self._changed = changed
        self._wanted: Counter[str] = Counter()
        self._subscribed: set[str] = set()
        self._again: set[str] = set()
        """Scopes that were subscribed to before, on a connection that has ended."""
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._outbox: asyncio.Queue[_Said | None] = asyncio.Queue()
        """What is to be said, in order; None: the connection has ended."""
        self._running: asyncio.Task[None] | None = None

    async def want(self, scope: str) -> None:
        """Returns when changes of the scope are heard from now on."""
        loop = asyncio.get_running_loop()
        self._wanted[scope] += 1
        try:
            if self._running is None:
                self._running = loop.create_task(self._run())
            if scope in self._subscribed:
                return
            if scope not in self._awaited:
                self._awaited[scope] = loop.create_future()
                self._say("SUBSCRIBE", scope)
            await shared(self._awaited[scope])
        except BaseException:
            self.leave(scope)
            raise

    def leave(self, scope: str) -> None:
        """One of those who wanted the scope does so no more."""
        self._wanted[scope] -= 1
        if not self._wanted[scope]:
            del self._wanted[scope]
            self._again.discard(scope)
            if scope in self._subscribed:
                self._subscribed.discard(scope)
                self._say("UNSUBSCRIBE", scope)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._fail(StoreUnusable("this store has been closed; open another"))

    def _say(self, verb: str, scope: str) -> None:
        self._outbox.put_nowait((verb, self._channels + scope))

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                wire = await self._address.reach()
            except StoreError as error:
                log.debug("changes cannot be heard: %s", error)
                self._fail(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            wire.hear = self._hear
            self._begin(wire)
            try:
                await self._speak(wire)
            except RedisError as error:
                log.debug("changes are no longer heard: %s", error)
            finally:
                self._again |= self._subscribed
                self._subscribed.clear()
                await wire.close()

    def _begin(self, wire: RedisConnection) -> None:
        """Subscribe to everything that is wanted, and forget what was not said."""
        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[_Said | None] = asyncio.Queue()
        self._outbox = outbox
        wire.ended.add_done_callback(lambda _: outbox.put_nowait(None))
        scopes = list(self._wanted)
        for scope in [scope for scope in self._awaited if scope not in self._wanted]:
            self._awaited.pop(scope).cancel()
        for scope in scopes:
            self._awaited.setdefault(scope, loop.create_future())
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            outbox.put_nowait(("SUBSCRIBE", *(self._channels + scope for scope in some)))

    async def _speak(self, wire: RedisConnection) -> None:
        """Say what is to be said, and ask for a sign now and then, until the connection ends."""
        loop = asyncio.get_running_loop()
        wire.heard_at = loop.time()
        while True:
            said: _Said | None = ("PING",)
            try:
                async with asyncio.timeout(_PING_S):
                    said = await self._outbox.get()
            except TimeoutError:
                if wire.run != self._address.run:
                    return
                if loop.time() - wire.heard_at > _SILENT_S:
                    log.debug("%s was silent for too long to be listened to", wire.where)
                    return
            if said is None:
                return
            await wire.say(said)

    def _hear(self, answer: Any) -> None:
        if isinstance(answer, Exception):
            self._fail(StoreUnusable(f"doyen may not subscribe to {self._channels}*: {answer}"))
        elif isinstance(answer, list) and answer[0] in (b"message", b"subscribe"):
            scope = answer[1].decode().removeprefix(self._channels)
            if answer[0] == b"message":
                self._changed(scope)
            else:
                self._heard_from_now(scope)

    def _heard_from_now(self, scope: str) -> None:
        awaited = self._awaited.pop(scope, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)
        if scope not in self._wanted:
            self._say("UNSUBSCRIBE", scope)
            return
        self._subscribed.add(scope)
        if scope in self._again:
            self._again.discard(scope)
            self._changed(scope)

    def _fail(self, error: StoreError) -> None:
        """Tell those who wait to hear something that they will not, for now."""
        awaited, self._awaited = self._awaited, {}
        for each in awaited.values():
            if not each.done():
                each.set_exception(error)
                each.exception()  # nobody may be left to look at it
