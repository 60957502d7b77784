"""Notification: few blocking queries, however many watches.

A blocking query is a read of all keys that begin with a prefix; an agent answers it only once their
index has passed the given one. Each query holds a connection, and agents limit those. So watches
share queries: a *cover* is one query and the watches under its prefix. While there are few scopes
each has a cover of its own, and only watches of a changed key wake up. Beyond that, covers become
those of whole elections, then of all elections.

- A watch is notified when the keys under its scope differ from what its cover last saw, or from
  anything that this store has since returned to a caller: an entry that was created, read and
  deleted between two answers leaves no other trace.
- After a failure, when the index has gone backwards, and when a watch has moved to another cover,
  it is notified in any case.
- The index rules of Consul: never below 1; begin anew if it goes backwards.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from doyen.errors import StoreError
from doyen.events.log_lines import log_line
from doyen.stores.consul.client import Agents, ConsulClient, ConsulResponse
from doyen.stores.kit.lifecycle import WatchHandle, begun_again

log = logging.getLogger("doyen.consul")

MOST_COVERS = 8
WAIT_S = 10.0
"""How long an agent holds a query without changes. It adds up to a sixteenth."""
SILENCE_S = 5.0
"""After how much longer a query is given up, because the connection is dead."""
PAUSE_S = 0.2
NO_CHANGE_PAUSE_S = 0.1
"""The pause after an answer without a change for any watch. A query for a key that does not exist
is answered at every change of a neighbouring key. Without a pause, a crowd of candidates would
repeat its queries at each."""


class ConsulWatches:
    """The watches of one store."""

    def __init__(self, agents: Agents, prefix: str) -> None:
        self._client = ConsulClient(agents)
        self._depth = prefix.count("/") + 1
        self._covers: dict[str, _Cover] = {}

    async def watch(self, scope: str, notify: Callable[[], None]) -> WatchHandle:
        watch = WatchHandle(scope, notify, self._forget)
        self._cover(watch)
        await watch.wait_begun()
        return watch

    def returned(self, key: str, version: int) -> None:
        """Note that this version of an entry is returned to a caller."""
        for prefix, cover in self._covers.items():
            if within(key, prefix):
                cover.returned[key].add(version)

    def _forget(self, watch: WatchHandle) -> None:
        for cover in list(self._covers.values()):
            cover.watches.pop(watch, None)
            if not cover.watches:
                self._close(cover)

    async def close(self) -> None:
        covers = list(self._covers.values())
        for cover in covers:
            for watch in list(cover.watches):
                watch.close()
        await asyncio.gather(*(cover.task for cover in covers), return_exceptions=True)
        await self._client.close()

    def _cover(self, watch: WatchHandle) -> None:
        """Put a watch under a cover. If there are too many covers, make them fewer and wider."""
        covers = list(self._covers.values())
        prefixes = [cover.prefix for cover in covers if within(watch.scope, cover.prefix)]
        if not prefixes and len(covers) < MOST_COVERS:
            prefixes = [watch.scope]
        moving = [watch]
        if not prefixes:
            moving += (each for cover in covers for each in cover.watches)
            prefixes = wider([each.scope for each in moving], self._depth)
            for cover in covers:
                if cover.prefix not in prefixes:
                    self._close(cover)
        for each in moving:
            self._join(next(prefix for prefix in prefixes if within(each.scope, prefix)), each)

    def _join(self, prefix: str, watch: WatchHandle) -> None:
        cover = self._covers.get(prefix)
        if cover is None:
            cover = self._covers[prefix] = _Cover(prefix, self._client)
        if watch not in cover.watches:
            cover.join(watch)

    def _close(self, cover: _Cover) -> None:
        del self._covers[cover.prefix]
        cover.task.cancel()


class _Cover:
    """One blocking query after another, and the watches under its prefix."""

    def __init__(self, prefix: str, client: ConsulClient) -> None:
        self.prefix = prefix
        self.watches: dict[WatchHandle, None] = {}
        self.returned: defaultdict[str, set[int]] = defaultdict(set)
        self._client = client
        self._seen: dict[str, int] | None = None
        """The version of each key in the last answer; None before the first and after a failure."""
        work = begun_again(self._run, f"queries of {prefix}")
        self.task = asyncio.get_running_loop().create_task(work)

    def join(self, watch: WatchHandle) -> None:
        self.watches[watch] = None
        if self._seen is not None:
            watch.begin()

    async def _run(self) -> None:
        index, self._seen = 0, None
        while True:
            try:
                answer = await self._ask(index)
                now = {each["Key"]: each["ModifyIndex"] for each in answer.entries}
            except StoreError as error:
                line = log_line(event="watches_interrupted", prefix=self.prefix, reason=error)
                log.debug("%s", line)
                index, self._seen = 0, None
                for watch in list(self.watches):
                    watch.fail(error)
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
                continue
            if answer.index < index:
                # The datacentre was restored: equal versions need not mean equal entries.
                index, self._seen = 0, None
                await asyncio.sleep(NO_CHANGE_PAUSE_S * random.uniform(0.5, 1.5))
                continue
            index = max(1, answer.index)
            if not self._take(now):
                await asyncio.sleep(NO_CHANGE_PAUSE_S * random.uniform(0.5, 1.5))

    async def _ask(self, index: int) -> ConsulResponse:
        request: dict[str, object] = {"recurse": None, "answer_s": SILENCE_S}
        if index:
            answer_s = WAIT_S * 17 / 16 + SILENCE_S
            request |= {"index": index, "wait": f"{WAIT_S:g}s", "answer_s": answer_s}
        return await self._client.ask(
            "GET",
            f"kv/{self.prefix}",
            accept=(200, 404),
            reads=True,
            blocking=bool(index),
            **request,
        )

    def _take(self, now: dict[str, int]) -> bool:
        """Notify the watches of what has changed; whether there were any."""
        before = self._seen
        self._seen, returned, self.returned = now, self.returned, defaultdict(set)
        if before is None:
            for watch in list(self.watches):
                watch.begin()
            return True
        changed = {key for key in (*now, *before) if now.get(key) != before.get(key)}
        changed |= {key for key, versions in returned.items() if versions != {now.get(key)}}
        touched = set(_paths(changed))
        concerned = [watch for watch in self.watches if watch.scope in touched]
        for watch in concerned:
            watch.notify()
        return bool(concerned)


def within(key: str, scope: str) -> bool:
    """Whether a key is the scope or below it."""
    return key == scope or key.startswith(f"{scope}/")


def wider(scopes: Iterable[str], depth: int) -> list[str]:
    """The fewest and narrowest prefixes for these scopes: those of elections, or of all of them.

    `depth` is the number of segments of the store's own prefix.

    >>> wider(["doyen/elections/a/leader", "doyen/elections/b/line"], 1)
    ['doyen/elections/a', 'doyen/elections/b']
    """
    scopes = list(scopes)
    prefixes: set[str] = set()
    for segments in (depth + 2, depth + 1):
        prefixes = {"/".join(scope.split("/")[:segments]) for scope in scopes}
        if len(prefixes) <= MOST_COVERS // 2:  # half, or the next watch would cause this again
            break
    return sorted(prefixes)


def _paths(keys: Iterable[str]) -> Iterator[str]:
    """The keys and everything above them."""
    for key in keys:
        segments = key.split("/")
        for count in range(1, len(segments) + 1):
            yield "/".join(segments[:count])
