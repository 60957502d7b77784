"""Configurations as sessions offer them: with asyncio (`Config`) and without (`BlockingConfig`).

Thin: the work is done on doyen's loop, in `doyen.manage.config` and `doyen.manage.applied`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from doyen.election.core import SessionCore
from doyen.election.options import default_name
from doyen.errors import BadDocument, ConfigError
from doyen.events.log_lines import log_line
from doyen.lease.runtime import ThreadRuntime
from doyen.manage.applied import Acknowledgement, WaitApplied, check_wait, wait_applied
from doyen.manage.config import (
    Change,
    ConfigDocument,
    ConfigReader,
    ConfigStore,
    Missed,
    ReaderPosition,
    Regressed,
)
from doyen.manage.typed import typed

__all__ = ["BlockingConfig", "BlockingSubscription", "Config", "Subscription"]

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("doyen")
Work = Callable[[], Coroutine[Any, Any, R]]


class _ConfigWork(Generic[T]):
    """What both kinds of sessions do, as coroutines for doyen's loop."""

    def __init__(
        self, core: SessionCore, name: str, kind: Any, author: str | None, history: int | None
    ) -> None:
        self.core = core
        self.store: ConfigStore[T] = ConfigStore(
            core, name, typed(kind), author=author or default_name(), keep=history
        )

    async def set(
        self, value: T, if_version: int | None, how: WaitApplied | None, wait_s: float
    ) -> ConfigDocument[T]:
        return await self._written(lambda: self.store.write(value, if_version), how, wait_s)

    async def rollback(
        self, version: int, if_version: int | None, how: WaitApplied | None, wait_s: float
    ) -> ConfigDocument[T]:
        return await self._written(lambda: self.store.rollback(version, if_version), how, wait_s)

    async def _written(
        self, write: Work[Any], how: WaitApplied | None, wait_s: float
    ) -> ConfigDocument[T]:
        check_wait(how, wait_s)
        written = await write()
        if how is not None:
            store = self.store
            await wait_applied(self.core, store.name, store.document, written, how, wait_s)
        return self.store.typed(written)


def _position(since: int | ConfigDocument[Any] | None) -> ReaderPosition | None:
    if since is None:
        return None
    if isinstance(since, ConfigDocument):
        return ReaderPosition(since.version, since.id)
    version: object = since
    if not isinstance(version, int) or version < 0:
        raise ConfigError(f"since is a version, 0 or more, or a document, not {since!r}")
    return ReaderPosition(version)


class Config(Generic[T]):
    """A configuration: a versioned document with a type. Made by `Session.config`.

    See docs/config.md.
    """

    def __init__(
        self, core: SessionCore, name: str, kind: Any, author: str | None, history: int | None
    ) -> None:
        self._work: _ConfigWork[T] = _ConfigWork(core, name, kind, author, history)
        self._core = core

    async def _run(self, work: Work[R]) -> R:
        self._core.check_open()
        return await self._core.runtime.do(self._core.run(work))

    async def get(self, version: int | None = None) -> ConfigDocument[T] | None:
        """The current document, or an earlier version of it; None if nothing was written yet.

        Raises `BadDocument` if it fails the type, and `ConfigError` if the store does not have the
        version.
        """
        return await self._run(partial(self._work.store.read, version))

    async def set(
        self,
        value: T,
        *,
        if_version: int | None = None,
        wait_applied: WaitApplied | None = None,
        wait_s: float = 10.0,
    ) -> ConfigDocument[T]:
        """Write a new version and return it.

            document = await config.get()
            await config.set(changed, if_version=document.version)

        With `if_version`, only if that is the current version (0: there is none), else `Conflict`.
        With `wait_applied`, return when all subscribers, or a majority of them, have applied it;
        `NotApplied` says which have not, and the new version stays.
        """
        return await self._run(partial(self._work.set, value, if_version, wait_applied, wait_s))

    async def rollback(
        self,
        version: int,
        *,
        if_version: int | None = None,
        wait_applied: WaitApplied | None = None,
        wait_s: float = 10.0,
    ) -> ConfigDocument[T]:
        """Write the value of an earlier version as a new version. Options as for `set`."""
        return await self._run(
            partial(self._work.rollback, version, if_version, wait_applied, wait_s)
        )

    async def history(self) -> list[ConfigDocument[Any]]:
        """All versions that the store has, the newest first, with their values as plain JSON."""
        return await self._run(self._work.store.history)

    async def observe(
        self, since: int | ConfigDocument[T] | None = None
    ) -> AsyncGenerator[Change[T], None]:
        """The current document, then every version after it; with `since`, every version after
        that one.

            async for change in config.observe(since=7):
                if isinstance(change, ConfigDocument):
                    print(change.version, change.value)

        Versions that the history no longer has are reported by `Missed`, ones that fail the type by
        a `BadDocument`, and a store that has lost confirmed writes by `Regressed`.
        """
        at = _position(since)
        reader = ConfigReader(self._work.store)
        try:
            while True:
                changes, at = await self._run(partial(reader.next, at))
                for change in changes:
                    yield change
        finally:
            self._core.runtime.post(reader.close)

    def subscribe(self, name: str | None = None) -> Subscription[T]:
        """Apply every version, and tell writers that it was applied.

            async with config.subscribe("server1") as documents:
                async for document in documents:
                    apply(document.value)

        A document counts as applied when the next one is asked for, and as refused after
        `documents.refuse(reason)`. `name` is shown to writers (default: host name and process id).
        """
        return Subscription(self._work, name or default_name())


class _Delivery(Generic[T]):
    """What a subscription has delivered and will deliver. Used on the caller's side."""

    def __init__(self, work: _ConfigWork[T], name: str) -> None:
        self.core = work.core
        self._config = work.store.name
        self._reader = ConfigReader(work.store)
        self._acknowledgement = Acknowledgement(work.core, work.store.name, name)
        self._at: ReaderPosition | None = None
        self._changes: deque[Change[T]] = deque()
        self._delivered: ConfigDocument[T] | None = None

    async def open(self) -> None:
        await self._acknowledgement.open()

    async def close(self) -> None:
        self._reader.close()
        await self._acknowledgement.close()

    def settle(self) -> None:
        """The caller asks for the next document, so it has applied the last one."""
        document, self._delivered = self._delivered, None
        if document is not None:
            self._post(self._acknowledgement.applied, document.version, document.id)

    def refuse(self, reason: str) -> None:
        document, self._delivered = self._delivered, None
        if document is None:
            raise ConfigError("there is no document to refuse: it was refused or applied already")
        self._post(self._acknowledgement.refused, document.version, document.id, reason)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        self.core.runtime.post(partial(call, *args))

    def next(self) -> ConfigDocument[T] | None:
        """The next document of those that were read; None if more must be read."""
        while self._changes:
            change = self._changes.popleft()
            if isinstance(change, ConfigDocument):
                self._delivered = change
                return change
            self._report(change)
        return None

    def _report(self, change: Missed | Regressed | BadDocument) -> None:
        name = self._config
        if isinstance(change, Missed):
            line = log_line(
                event="config_versions_missed", config=name, first=change.first, last=change.last
            )
        elif isinstance(change, Regressed):
            line = log_line(event="config_regressed", config=name, was=change.was, now=change.now)
        else:
            line = log_line(event="config_refused", config=name, error=change)
            if change.version is not None:
                refused = self._acknowledgement.refused
                self._post(refused, change.version, change.id, str(change))
        log.warning("%s", line)

    async def read(self) -> tuple[Any, ReaderPosition | None]:
        return await self._reader.next(self._at)

    def take(self, read: tuple[Any, ReaderPosition | None]) -> None:
        changes, self._at = read
        self._changes.extend(changes)


class Subscription(Generic[T]):
    """The documents of a configuration, to be applied one after the other. Made by
    `Config.subscribe`."""

    def __init__(self, work: _ConfigWork[T], name: str) -> None:
        self._delivery = _Delivery(work, name)
        self._core = work.core

    async def __aenter__(self) -> Subscription[T]:
        self._core.runtime.retain()
        try:
            await self._run(self._delivery.open)
        except BaseException:
            self._core.runtime.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            await self._core.runtime.finish(self._delivery.close())
        finally:
            self._core.runtime.release()

    async def _run(self, work: Work[R]) -> R:
        self._core.check_open()
        return await self._core.runtime.do(self._core.run(work))

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> ConfigDocument[T]:
        self._delivery.settle()
        while (document := self._delivery.next()) is None:
            self._delivery.take(await self._run(self._delivery.read))
        return document

    def applied(self) -> None:
        """Acknowledge the document that was delivered last now, and not only when the next one is
        asked for."""
        self._delivery.settle()

    def refuse(self, reason: str) -> None:
        """Refuse the document that was delivered last. Writers that wait for it get the reason."""
        self._delivery.refuse(reason)


class BlockingConfig(Generic[T]):
    """A configuration, for code without asyncio. Made by `BlockingSession.config`; what its methods
    do is described at `Config`."""

    def __init__(
        self,
        core: SessionCore,
        runtime: ThreadRuntime,
        name: str,
        kind: Any,
        author: str | None,
        history: int | None,
    ) -> None:
        self._work: _ConfigWork[T] = _ConfigWork(core, name, kind, author, history)
        self._core = core
        self._runtime = runtime

    def _run(self, work: Work[R]) -> R:
        self._core.check_open()
        return self._runtime.do_blocking(self._core.run(work))

    def get(self, version: int | None = None) -> ConfigDocument[T] | None:
        """The current document, or an earlier version of it; None if nothing was written yet."""
        return self._run(partial(self._work.store.read, version))

    def set(
        self,
        value: T,
        *,
        if_version: int | None = None,
        wait_applied: WaitApplied | None = None,
        wait_s: float = 10.0,
    ) -> ConfigDocument[T]:
        """Write a new version and return it."""
        return self._run(partial(self._work.set, value, if_version, wait_applied, wait_s))

    def rollback(
        self,
        version: int,
        *,
        if_version: int | None = None,
        wait_applied: WaitApplied | None = None,
        wait_s: float = 10.0,
    ) -> ConfigDocument[T]:
        """Write the value of an earlier version as a new version."""
        return self._run(partial(self._work.rollback, version, if_version, wait_applied, wait_s))

    def history(self) -> list[ConfigDocument[Any]]:
        """All versions that the store has, the newest first, with their values as plain JSON."""
        return self._run(self._work.store.history)

    def observe(
        self, since: int | ConfigDocument[T] | None = None
    ) -> Generator[Change[T], None, None]:
        """The current document, then every version after it; with `since`, every version after
        that one."""
        at = _position(since)
        reader = ConfigReader(self._work.store)
        try:
            while True:
                changes, at = self._run(partial(reader.next, at))
                yield from changes
        finally:
            self._runtime.post(reader.close)

    def subscribe(self, name: str | None = None) -> BlockingSubscription[T]:
        """Apply every version, and tell writers that it was applied."""
        return BlockingSubscription(self._work, self._runtime, name or default_name())


class BlockingSubscription(Generic[T]):
    """The documents of a configuration, to be applied one after the other. Made by
    `BlockingConfig.subscribe`."""

    def __init__(self, work: _ConfigWork[T], runtime: ThreadRuntime, name: str) -> None:
        self._delivery = _Delivery(work, name)
        self._core = work.core
        self._runtime = runtime

    def __enter__(self) -> BlockingSubscription[T]:
        self._runtime.retain()
        try:
            self._run(self._delivery.open)
        except BaseException:
            self._runtime.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            self._runtime.finish_blocking(self._delivery.close())
        finally:
            self._runtime.release()

    def _run(self, work: Work[R]) -> R:
        self._core.check_open()
        return self._runtime.do_blocking(self._core.run(work))

    def __iter__(self) -> BlockingSubscription[T]:
        return self

    def __next__(self) -> ConfigDocument[T]:
        self._delivery.settle()
        while (document := self._delivery.next()) is None:
            self._delivery.take(self._run(self._delivery.read))
        return document

    def applied(self) -> None:
        """Acknowledge the document that was delivered last now, and not only when the next one is
        asked for."""
        self._delivery.settle()

    def refuse(self, reason: str) -> None:
        """Refuse the document that was delivered last. Writers that wait for it get the reason."""
        self._delivery.refuse(reason)
