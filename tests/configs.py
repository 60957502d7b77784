"""What the tests of configurations share: followers, subscribers, and a look into the store."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from doyen import (
    Config,
    ConfigDocument,
)
from doyen._waiting import retrieve
from doyen.manage.applied import Applied
from doyen.model import Entry, config_key
from doyen.stores.memory import MemoryServer
from support import Place, until

CURRENT = config_key("limits", "current")


class Limits(msgspec.Struct):
    """A type."""

    workers: int


def history_of(place: Place) -> dict[int, bytes]:
    """The versions before the current one. That one may be in the history as well."""
    entries = place.server.list(config_key("limits", "history"))
    kept = {int(entry.key.rpartition("/")[2]): entry.value for entry in entries}
    newest = max(kept, default=0)
    if newest and kept[newest] == current_of(place).value:
        del kept[newest]
    return kept


def current_of(place: Place) -> Entry:
    entry = place.server.get(CURRENT)
    assert entry is not None
    return entry


def acknowledgements(place: Place) -> list[tuple[str, int]]:
    entries = place.server.list(config_key("limits", "applied"))
    return sorted((says.name, says.version) for says in map(Applied.decode, entries))


class Follower:
    """Observes in the background."""

    def __init__(self, config: Config[Any], since: int | None = None) -> None:
        self.seen: list[Any] = []
        self.task = asyncio.ensure_future(self._follow(config, since))
        self.task.add_done_callback(retrieve)

    async def _follow(self, config: Config[Any], since: int | None) -> None:
        async for change in config.observe(since):
            self.seen.append(change)

    @property
    def versions(self) -> list[Any]:
        return [c.version if isinstance(c, ConfigDocument) else c for c in self.seen]

    @property
    def documents(self) -> list[int]:
        return [c.version for c in self.seen if isinstance(c, ConfigDocument)]


class Subscriber:
    """Applies in the background: takes `slow_s` for it, and refuses what `refuses` names."""

    def __init__(
        self, config: Config[Any], name: str, *, slow_s: float = 0.0, refuses: str = ""
    ) -> None:
        self.applied: list[int] = []
        self.slow_s = slow_s
        self.task = asyncio.ensure_future(self._live(config, name, refuses))
        self.task.add_done_callback(retrieve)

    async def _live(self, config: Config[Any], name: str, refuses: str) -> None:
        async with config.subscribe(name) as documents:
            async for document in documents:
                await asyncio.sleep(self.slow_s)
                if refuses:
                    documents.refuse(refuses)
                else:
                    self.applied.append(document.version)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def subscriber(place: Place, name: str, **how: Any) -> Subscriber:
    subscribed = Subscriber((await place.open()).config("limits"), name, **how)
    await until(lambda: name in dict(acknowledgements(place)))
    return subscribed


class Backup:
    """The values of a configuration, to be restored: as a failover to a replica that was behind."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._values = {entry.key: entry.value for entry in server.list("config/limits")}

    def restore(self) -> None:
        for entry in self._server.list("config/limits"):
            if "/applied/" not in entry.key and entry.key not in self._values:
                self._server.delete(entry.key)
        for key, value in self._values.items():
            if "/applied/" not in key:
                there = self._server.get(key)
                self._server.put(key, value, None if there is None else there.version)
