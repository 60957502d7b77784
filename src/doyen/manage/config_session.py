"""Configurations as sessions offer them: with asyncio (`Config`) and without (`BlockingConfig`).

Thin: the work is done on doyen's loop, in `doyen.manage.config` and `doyen.manage.applied`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from doyen.election.core import SessionCore
from doyen.election.options import default_name
from doyen.errors import BadDocument, ConfigError, NotApplied
from doyen.events.log_lines import log_line
from doyen.lease.runtime import ThreadRuntime
from doyen.manage.applied import Acknowledgement, WaitApplied, check_wait, wait_until_applied
from doyen.manage.config import (
    Change,
    ConfigDocument,
    ConfigReader,
    ConfigStore,
    Missed,
    ReaderPosition,
    Regressed,
)
from doyen.manage.documents import Versioned
from doyen.manage.typed import typed
from doyen.model import Reachable, Unreachable

__all__ = [
    "BlockingConfig",
    "BlockingSubscription",
    "Config",
    "ConfigOptions",
    "Subscription",
    "WriteOptions",
]

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("doyen")
Work = Callable[[], Coroutine[Any, Any, R]]


class ConfigOptions(TypedDict, total=False):
    """The options of a configuration."""

    author: str
    """Who writes. Default: host name and process id."""
    history: int
    """How many earlier versions are kept from the next write on. Default: as many as before, 20 at
    first."""


class WriteOptions(TypedDict, total=False):
    """The options of a write to a configuration."""

    if_version: int | None
    """Write only if this is the current version (0: there is none), else raise `Conflict`."""
    wait_applied: WaitApplied | None
    """Return when all subscribers, or a majority of them, have applied the new version.
    `NotApplied` says which have not, and the new version stays."""
    wait_s: float
    """How long to wait for the subscribers. Default 10 s."""
    force: bool
    """Replace a current document that cannot be read. Without it `BadDocument` is raised."""


async def _do(core: SessionCore, work: Work[R]) -> R:
    core.check_open()
    return await core.runtime.do(core.run(work))


def _do_blocking(core: SessionCore, work: Work[R]) -> R:
    core.check_open()
    return _thread(core).do_blocking(core.run(work))


def _thread(core: SessionCore) -> ThreadRuntime:
    assert isinstance(core.runtime, ThreadRuntime)
    return core.runtime


def _position(since: int | ConfigDocument[Any] | None) -> ReaderPosition | None:
    if since is None:
        return None
    if isinstance(since, ConfigDocument):
        return ReaderPosition(since.version, since.id)
    version: object = since
    if not isinstance(version, int) or version < 0:
        raise ConfigError(f"since is a version, 0 or more, or a document, not {since!r}")
    return ReaderPosition(version)


class _ConfigWork(Generic[T]):
    """What both kinds of configurations do, as coroutines for doyen's loop."""

    def __init__(
        self,
        core: SessionCore,
        name: str,
        kind: Any,
        *,
        author: str | None = None,
        history: int | None = None,
    ) -> None:
        self._core = core
        self._store: ConfigStore[T] = ConfigStore(
            core, name, typed(kind), author=author or default_name(), keep=history
        )

    async def _written(
        self,
        write: Callable[..., Coroutine[Any, Any, Versioned]],
        *,
        if_version: int | None = None,
        wait_applied: WaitApplied | None = None,
        wait_s: float = 10.0,
        force: bool = False,
    ) -> Versioned:
        check_wait(wait_applied, wait_s)
        store = self._store
        written = await write(if_version, force=force)
        try:
            if wait_applied is not None:
                await wait_until_applied(
                    self._core, store.name, store.document, written, wait_applied, wait_s
                )
        except NotApplied:
            await store.tidy(written)
            raise
        await store.tidy(written)
        return written

    def _typed(self, found: Versioned | None) -> ConfigDocument[T] | None:
        return None if found is None else self._store.typed(found)

    def _set(self, value: Any, options: WriteOptions) -> tuple[Work[Versioned], T]:
        """The write of a value, and the value as readers will get it. On the caller's thread."""
        plain, read = self._store.to_json(value)
        return partial(self._written, partial(self._store.write, plain), **options), read

    def _earlier(self, version: int, options: WriteOptions) -> Work[Versioned | None]:
        force = options.get("force", False)
        return partial(self._store.read, version, unreadable=force)

    def _roll_back(
        self, earlier: Versioned | None, options: WriteOptions
    ) -> tuple[Work[Versioned], T]:
        """As `_set`, for the value of an earlier version. That is written as it is: it need not be
        what the type takes in Python."""
        assert earlier is not None
        read = self._store.typed(earlier).value
        plain = self._store.plain(earlier).value
        return partial(self._written, partial(self._store.write, plain), **options), read

    def _document(self, written: Versioned, value: T) -> ConfigDocument[T]:
        return replace(self._store.plain(written), value=value)


class Config(_ConfigWork[T]):
    """A configuration: a versioned document with a type. Made by `Session.config`.

    See docs/config.md.
    """

    async def get(self, version: int | None = None) -> ConfigDocument[T] | None:
        """The current document, or an earlier version of it; None if nothing was written yet.

        Raises `BadDocument` if it fails the type, and `ConfigError` if the store does not have the
        version.
        """
        return self._typed(await _do(self._core, partial(self._store.read, version)))

    async def set(self, value: T, **options: Unpack[WriteOptions]) -> ConfigDocument[T]:
        """Write a new version and return it.

        document = await config.get()
        await config.set(changed, if_version=document.version, wait_applied="all")
        """
        write, read = self._set(value, options)
        return self._document(await _do(self._core, write), read)

    async def rollback(self, version: int, **options: Unpack[WriteOptions]) -> ConfigDocument[T]:
        """Write the value of an earlier version as a new version. Options as for `set`."""
        earlier = await _do(self._core, self._earlier(version, options))
        write, read = self._roll_back(earlier, options)
        return self._document(await _do(self._core, write), read)

    async def history(self) -> list[ConfigDocument[Any]]:
        """All versions that the store has, the newest first, with their values as plain JSON."""
        return await _do(self._core, self._store.history)

    async def observe(
        self, since: int | ConfigDocument[T] | None = None
    ) -> AsyncGenerator[Change[T], None]:
        """The current document, then every version after it; with `since`, every version after
        that one.

            async for change in config.observe(since=7):
                if isinstance(change, ConfigDocument):
                    print(change.version, change.value)

        Versions that the history no longer has are reported by `Missed`, ones that fail the type by
        a `BadDocument`, and a store that has lost confirmed writes by `Regressed`. `Unreachable`
        says that the store has not answered for a ttl, and `Reachable` that it does again.
        """
        at = _position(since)
        reader = ConfigReader(self._store, observes=True)
        try:
            while True:
                changes, at = await _do(self._core, partial(reader.next, at))
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
        return Subscription(self._store, name or default_name())


class BlockingConfig(_ConfigWork[T]):
    """A configuration, for code without asyncio. Made by `BlockingSession.config`; what its methods
    do is described at `Config`."""

    def get(self, version: int | None = None) -> ConfigDocument[T] | None:
        """The current document, or an earlier version of it; None if nothing was written yet."""
        return self._typed(_do_blocking(self._core, partial(self._store.read, version)))

    def set(self, value: T, **options: Unpack[WriteOptions]) -> ConfigDocument[T]:
        """Write a new version and return it."""
        write, read = self._set(value, options)
        return self._document(_do_blocking(self._core, write), read)

    def rollback(self, version: int, **options: Unpack[WriteOptions]) -> ConfigDocument[T]:
        """Write the value of an earlier version as a new version."""
        earlier = _do_blocking(self._core, self._earlier(version, options))
        write, read = self._roll_back(earlier, options)
        return self._document(_do_blocking(self._core, write), read)

    def history(self) -> list[ConfigDocument[Any]]:
        """All versions that the store has, the newest first, with their values as plain JSON."""
        return _do_blocking(self._core, self._store.history)

    def observe(
        self, since: int | ConfigDocument[T] | None = None
    ) -> Generator[Change[T], None, None]:
        """The current document, then every version after it; with `since`, every version after
        that one."""
        at = _position(since)
        reader = ConfigReader(self._store, observes=True)
        try:
            while True:
                changes, at = _do_blocking(self._core, partial(reader.next, at))
                yield from changes
        finally:
            self._core.runtime.post(reader.close)

    def subscribe(self, name: str | None = None) -> BlockingSubscription[T]:
        """Apply every version, and tell writers that it was applied."""
        return BlockingSubscription(self._store, name or default_name())


class _Subscribed(Generic[T]):
    """What a subscription has delivered and will deliver. Used on the caller's side."""

    def __init__(self, store: ConfigStore[T], name: str) -> None:
        self._core = store.core
        self._config = store.name
        self._reader = ConfigReader(store)
        self._acknowledgement = Acknowledgement(store.core, store.name, name)
        self._at: ReaderPosition | None = None
        self._changes: deque[Change[T]] = deque()
        self._delivered: ConfigDocument[T] | None = None

    def applied(self) -> None:
        """Acknowledge the document that was delivered last now, and not only when the next one is
        asked for."""
        document, self._delivered = self._delivered, None
        if document is not None:
            self._post(self._acknowledgement.applied, document.version, document.id)

    def refuse(self, reason: str) -> None:
        """Refuse the document that was delivered last. Writers that wait for it get the reason."""
        document, self._delivered = self._delivered, None
        if document is None:
            raise ConfigError("there is no document to refuse: it was refused or applied already")
        self._post(self._acknowledgement.refused, document.version, document.id, reason)

    async def _close(self) -> None:
        self._reader.close()
        await self._acknowledgement.close()

    def _post(self, call: Callable[..., None], *args: object) -> None:
        self._core.runtime.post(partial(call, *args))

    async def _read(self) -> tuple[Any, ReaderPosition | None]:
        read = await self._reader.next(self._at)
        self._acknowledgement.read_took_s = self._reader.took_s
        return read

    def _take(self, read: tuple[Any, ReaderPosition | None]) -> None:
        changes, self._at = read
        self._changes.extend(changes)

    def _next(self) -> ConfigDocument[T] | None:
        """The next document of those that were read; None if more must be read."""
        while self._changes:
            change = self._changes.popleft()
            if isinstance(change, ConfigDocument):
                self._delivered = change
                return change
            if not isinstance(change, Unreachable | Reachable):
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


class Subscription(_Subscribed[T]):
    """The documents of a configuration, to be applied one after the other. Made by
    `Config.subscribe`."""

    async def __aenter__(self) -> Subscription[T]:
        self._core.runtime.retain()
        try:
            await _do(self._core, self._acknowledgement.open)
        except BaseException:
            self._core.runtime.release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._core.runtime.finish(self._close())
        finally:
            self._core.runtime.release()

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> ConfigDocument[T]:
        self.applied()
        while (document := self._next()) is None:
            self._take(await _do(self._core, self._read))
        return document


class BlockingSubscription(_Subscribed[T]):
    """The documents of a configuration, to be applied one after the other. Made by
    `BlockingConfig.subscribe`."""

    def __enter__(self) -> BlockingSubscription[T]:
        self._core.runtime.retain()
        try:
            _do_blocking(self._core, self._acknowledgement.open)
        except BaseException:
            self._core.runtime.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _thread(self._core).finish_blocking(self._close())
        finally:
            self._core.runtime.release()

    def __iter__(self) -> BlockingSubscription[T]:
        return self

    def __next__(self) -> ConfigDocument[T]:
        self.applied()
        while (document := self._next()) is None:
            self._take(_do_blocking(self._core, self._read))
        return document
