"""`layout=lock`: the key of `consul lock`, and of `Lock` in Consul's Go client.

    NAME/.lock      held by the session of the leader, with the flags by which the Go client
                    recognises its locks

There is no line: the session that locks the key leads, as in the recipe `race`. The value is the
claim of a candidate of doyen; `consul lock` writes none and reads none.

- The token is the index of the write that locked the key. The Go client keeps the key when it
  unlocks it, and `consul lock` deletes it, so neither the creation index nor the lock index grows
  with every term. Nothing writes to a key that is locked, so every process can read the token.
- A key is locked only from the state in which it was read: absent, or unlocked at that index. A
  request that is carried out late thus cannot lock it again, under another token.
- Lock-delay: when Consul ends the session of a foreign leader, no session can lock the key for as
  long as that session asked for, 15 s by default. This is what protects against a leader that does
  not stop in time, so doyen waits too. Consul does not report the end of the delay, so candidates
  that wait are notified once a second. The sessions of doyen ask for no delay.
"""

from __future__ import annotations

import asyncio
from builtins import list as list_
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from doyen.errors import StoreUnusable
from doyen.model import Claim, Entry, Finding, Lease, Version
from doyen.stores.consul.client import Agents
from doyen.stores.consul.store import ConsulStore, Operation, lock_operation, refuse_ended
from doyen.stores.kit.layouts import foreign_claim, layout_finding, place_of, plain_claim, refuse
from doyen.stores.kit.lifecycle import GuardedStore, WatchHandle
from doyen.stores.port import Creation, Watch

LAYOUT = "lock"
FLAGS = 0x2DDCCBC058A50C18
"""Of the keys of locks of the Go client."""
LOCK_DELAY = "lock-delay of Consul"
"""Shown as the leader while Consul refuses every lock of the key."""
RETRY_S = 1.0
_NAMES = 1000
"""How many names of sessions are kept."""


class ConsulLockStore(ConsulStore):
    """A store on a Consul datacentre, in the layout of `consul lock`."""

    capabilities = replace(ConsulStore.capabilities, layout=LAYOUT, has_line=False)

    def __init__(self, agents: Agents, *, prefix: str) -> None:
        super().__init__(agents, prefix=prefix)
        self._names: dict[str, str] = {}
        """The names of sessions of other programs."""
        self._watching: list_[WatchHandle] = []

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if place_of(key, LAYOUT).part != "leader":
            refuse(LAYOUT, "orders and transfers")
        plain_claim(value, LAYOUT)
        path, before = self._path(key), self._highest
        while True:
            existing = await self._raw(key)
            if existing is not None and existing["Flags"] != FLAGS:
                raise StoreUnusable(
                    f"the key {path} is not that of a lock (flags {existing['Flags']:#x}): another"
                    " program uses it, such as consul lock with -n above 1; choose another name"
                )
            if existing is not None and existing.get("Session"):
                return Creation(False, await self._leader(key, existing))
            condition: Operation = {"Verb": "check-not-exists", "Key": path}
            if existing is not None:
                index = existing["ModifyIndex"]
                condition = {"Verb": "check-index", "Key": path, "Index": index}
            lock = {**lock_operation(path, value, lease), "Flags": FLAGS}
            answer = await self._transact(condition, lock)
            if answer.status == 200:
                written = self._written(answer, value)
                record = written._replace(key=key, revision=int(str(written.version)))
                return Creation(True, await self._newer(record, before))
            refuse_ended(answer)
            if any("lock delay" in error["What"] for error in answer.json["Errors"]):
                asyncio.get_running_loop().call_later(RETRY_S, self._retry, path)
                return Creation(False, Entry(key, foreign_claim(LOCK_DELAY), 0, None))

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        place_of(key, LAYOUT)
        refuse(LAYOUT, "entries without a lease")

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        refuse(LAYOUT, "changes of what a leader shows")

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return place_of(key, LAYOUT).part == "leader" and await super().delete(
            key, if_version=if_version
        )

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        refuse(LAYOUT, "lines")

    create_and_look = GuardedStore.create_and_look  # by the operations of the layout

    async def ahead(self, ticket: Entry) -> Entry | None:
        refuse(LAYOUT, "lines")

    async def get(self, key: str) -> Entry | None:
        if place_of(key, LAYOUT).part != "leader":
            return None
        raw = await self._raw(key)
        return await self._leader(key, raw) if raw is not None and raw.get("Session") else None

    async def list(self, prefix: str) -> list_[Entry]:
        place_of(prefix, LAYOUT)
        return []

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        if place_of(scope, LAYOUT).part != "leader":
            return WatchHandle(scope, notify, lambda _: None)
        watch = await self._watches.watch(self._path(scope), notify)
        self._watching = [*(each for each in self._watching if not each.closed), watch]
        return watch

    def _retry(self, path: str) -> None:
        """Have candidates try again that wait for the end of the lock-delay."""
        for watch in self._watching:
            if watch.scope == path:
                watch.notify()

    async def diagnose(self) -> Sequence[Finding]:
        finding = layout_finding(
            LAYOUT,
            "consul lock and programs with Consul's Go client",
            "they notice a lost lock late, when their query for the key returns, and lock-delay is"
            " all that keeps others away meanwhile; they have no token",
        )
        return [*await super().diagnose(), finding]

    async def _raw(self, key: str) -> dict[str, Any] | None:
        return next(iter(await self._read(f"kv/{self._path(key)}")), None)

    async def _leader(self, key: str, raw: dict[str, Any]) -> Entry:
        entry = self._entry(raw)
        value = entry.value
        if not Claim.decode(value).attempt:
            value = foreign_claim(await self._name(raw["Session"]))
        return entry._replace(key=key, value=value, revision=raw["ModifyIndex"])

    async def _name(self, session: str) -> str:
        """The name of a session of another program."""
        if session not in self._names:
            answer = await self._client.ask("GET", f"session/info/{session}", reads=True)
            found: dict[str, str] = next(iter(answer.json or ()), {})
            if len(self._names) >= _NAMES:
                self._names.clear()
            self._names[session] = found.get("Name") or found.get("Node") or session
        return self._names[session]

    def _path(self, key: str) -> str:
        place = place_of(key, LAYOUT)
        return "/".join(filter(None, (self._prefix, place.name.strip("/"), ".lock")))
