"""Configurations: a versioned document with a type, a bounded history, and readers without gaps.

    config/<name>/current              {schema, version, id, author, at, previous, history, value}
    config/<name>/history/<version>    the same bytes, of an earlier version or of the current one
    config/<name>/applied/<subscriber> see `doyen.manage.applied`

- Before `current` moves from version v to v + 1, its writer makes sure that `history/v` has version
  v, byte for byte. So a version that has been current is either current or in the history, and a
  writer that dies at any point leaves nothing half done. Usually the writer of v has copied it as
  soon as it was written. Readers are notified when v becomes current, and do not wait for the copy.
- A writer that writes again begins with the version that it wrote last. If that is not the current
  one any more, its write is refused, and it reads.
- A version is identified by its number and a random id, and names the id of the version before it
  (`previous`). A reader can therefore tell whether what it reads follows on what it had. If not,
  the store has lost confirmed writes, and the reader is notified (`Regressed`).
- Readers watch `current` only. A watch on a key above it would notify every reader of the
  acknowledgements of all others.
- A version that fails its type is reported (`BadDocument`), and the last good one stays in force.

Everything in this module runs on doyen's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from doyen.election.core import SessionCore
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    describe,
)
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned
from doyen.manage.typed import Typed, TypeRefused
from doyen.model import Entry, Reachable, Unreachable, config_key
from doyen.stores.port import Watch

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "Change",
    "ConfigDocument",
    "ConfigReader",
    "ConfigStore",
    "Missed",
    "ReaderPosition",
    "Regressed",
]

T = TypeVar("T")
log = logging.getLogger("doyen")

DIGITS = 20
"""Versions have fewer. Python refuses to read a number of more than some thousand digits."""
KEEP = 20
"""How many versions before the current one are kept, unless a writer says otherwise."""


@dataclass(frozen=True, slots=True)
class ConfigDocument(Generic[T]):
    """One version of a configuration."""

    name: str
    version: int
    id: str
    """Random. Two documents of the same version with different ids show that the store has lost
    confirmed writes."""
    author: str
    at: datetime
    """When it was written, by the clock of its author. For display."""
    value: T


class Missed(NamedTuple):
    """An observer fell so far behind that these versions are no longer in the history."""

    first: int
    last: int


class Regressed(NamedTuple):
    """The store has lost confirmed writes: the version that was `was` is `now` (0: there is none),
    or another document with the same version. The observer gets that document next."""

    was: int
    now: int


Notice = Unreachable[ConfigDocument[T]] | Reachable
Change = ConfigDocument[T] | Missed | Regressed | BadDocument | Notice[T]


class ReaderPosition(NamedTuple):
    """What a reader has read last. An empty id means that only the version is known."""

    version: int
    id: str = ""

    def is_at(self, current: Versioned | None) -> bool:
        if current is None:
            return self.version == 0
        return self.version == current.version and self.id in ("", current.id)


def _number(entry: Entry) -> int:
    """The version that an entry of the history is for; 0 if another program has made it."""
    number = entry.key.rpartition("/")[2]
    return int(number) if number.isdecimal() and len(number) < DIGITS else 0


class ConfigStore(Generic[T]):
    """One configuration in the store: reads, writes and keeps its history."""

    def __init__(
        self, core: SessionCore, name: str, kind: Typed[T], *, author: str, keep: int | None
    ) -> None:
        kept: object = keep
        if kept is not None and (not isinstance(kept, int) or kept < 1):
            raise ConfigError(f"history is the number of versions to keep, 1 or more, not {kept!r}")
        self.core = core
        self.name = name
        self.kind = kind
        self._author = author
        self._keep = keep
        self.document = Document(core.calls, config_key(name, "current"))
        self._kept_version: Versioned | None = None
        """The version that this writer wrote last, if the history has it."""

    # Reading.

    async def read(
        self, version: int | None = None, *, unreadable: bool = True
    ) -> Versioned | None:
        """The current version, or an earlier one, also if the current one is `unreadable`. None if
        there is none yet."""
        current = await self.current(unreadable=unreadable and version is not None)
        return current if version is None else await self._earlier(current, version)

    async def current(self, *, unreadable: bool = False) -> Versioned | None:
        """The current version, as the store has it. If it cannot be read, `BadDocument` is raised,
        or with `unreadable` the place of such a version is returned: it has no id and no value."""
        try:
            current = await self.document.read()
            if current is not None:
                self.plain(current)
            return current
        except BadDocument as error:
            if unreadable and (entry := await self._get(self.document.key)) is not None:
                # Its number is not known. It is higher than that of all that the history has.
                version = 1 + max(map(_number, await self._history()), default=0)
                return Versioned({}, version, "", 0, entry)
            raise BadDocument(
                f"{error}. To replace it by an earlier version or by a new value, use"
                f" 'doyen config rollback {self.name} VERSION --force' or 'doyen config set"
                f" {self.name} VALUE --force', or force=True in the API"
            ) from error

    async def newest_kept(self) -> Versioned | None:
        """The newest version in the history."""
        kept = await self._kept_versions()
        return max(kept, key=lambda each: each.version, default=None)

    async def _earlier(self, current: Versioned | None, version: int) -> Versioned:
        if current is not None and current.version == version:
            return current
        if current is not None and 0 < version < current.version:
            found = await self.earlier(version)
            if found is not None:
                return found
        raise ConfigError(f"{self.name!r} has no version {version}: {await self._known(current)}")

    async def earlier(self, version: int) -> Versioned | None:
        """A version from the history."""
        entry = await self._get(config_key(self.name, "history", version))
        return None if entry is None else Versioned.decode(entry)

    async def _known(self, current: Versioned | None) -> str:
        if current is None:
            return "nothing has been written yet"
        oldest = min(
            (each.version for each in await self._listed(current)), default=current.version
        )
        return f"the store has versions {oldest} to {current.version}"

    async def _kept_versions(self) -> list[Versioned]:
        """What the history has and can be read."""
        kept = []
        for entry in await self._history():
            with suppress(BadDocument):  # another program has written it
                version = Versioned.decode(entry)
                self.plain(version)
                if version.version == _number(entry):
                    kept.append(version)
        return kept

    async def _history(self) -> list[Entry]:
        """What the history has."""
        prefix = config_key(self.name, "history")
        entries = await self.core.call(self.core.store.list(prefix))
        return [entry for entry in entries if _number(entry)]

    async def _listed(self, current: Versioned) -> list[Versioned]:
        return [each for each in await self._kept_versions() if each.version < current.version]

    async def history(self) -> list[ConfigDocument[Any]]:
        """All versions that the store has, the newest first. Their values are plain JSON: an old
        one need not be of the type that is used now. One that cannot be read is left out."""
        current = await self.current(unreadable=True)
        if current is None:
            return []
        kept = sorted(await self._listed(current), key=lambda each: -each.version)
        return [self.plain(each) for each in [current, *kept] if each.id]

    def plain(self, version: Versioned) -> ConfigDocument[Any]:
        """A version with its value as plain JSON."""
        from datetime import UTC, datetime  # takes long to import

        body = version.body
        try:
            at = datetime.fromtimestamp(float(body["at"]), UTC)
            author = str(body["author"])
            value = body["value"]
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            raise BadDocument(
                f"{version.entry.key} is not a configuration: {error!r}; another program has"
                " written it",
                version=version.version,
                id=version.id,
            ) from error
        return ConfigDocument(self.name, version.version, version.id, author, at, value)

    def typed(self, version: Versioned) -> ConfigDocument[T]:
        """A version with its value. Raises `BadDocument` if that fails the type. Not on doyen's
        loop: the type may have code of the user, which may block."""
        plain = self.plain(version)
        try:
            return replace(plain, value=self.kind.from_json(plain.value))
        except TypeRefused as error:
            raise self._failing(plain, error) from error

    async def typed_aside(self, version: Versioned) -> ConfigDocument[T] | BadDocument:
        """As `typed`, on doyen's loop: the code of the user runs on another thread."""
        if not self.kind.may_block:
            return self._typed_or_why(version)
        return await self.core.runtime.aside(partial(self._typed_or_why, version), lambda _: None)

    def _typed_or_why(self, version: Versioned) -> ConfigDocument[T] | BadDocument:
        try:
            return self.typed(version)
        except BadDocument as error:
            return error
        except BaseException as error:  # noqa: BLE001 - it would end doyen's loop
            return self._failing(self.plain(version), error)

    def _failing(self, plain: ConfigDocument[Any], error: BaseException) -> BadDocument:
        why = str(error) if isinstance(error, TypeRefused) else f"its type raised {describe(error)}"
        return BadDocument(
            f"version {plain.version} of {self.name!r}, by {plain.author!r}, fails its type: {why}",
            version=plain.version,
            id=plain.id,
            author=plain.author,
        )

    async def _get(self, key: str) -> Entry | None:
        return await self.core.call(self.core.store.get(key))

    # Writing.

    def to_json(self, value: Any) -> tuple[Any, T]:
        """A value as plain JSON, and as readers will get it. Not on doyen's loop, as `typed`."""
        try:
            return self.kind.to_json(value)
        except TypeRefused as error:
            raise BadDocument(f"{self.name!r} was not written: {error}") from error

    async def write(self, plain: Any, if_version: int | None, *, force: bool = False) -> Versioned:
        """Write a new version. Raises `Conflict` if the current one is not `if_version`, and
        `BadDocument` if it cannot be read, unless `force` is given.

        `StoreUnavailable` means that nothing was written. `OutcomeUnknown` is raised only if the
        store did not report for one ttl whether the new version was written.
        """
        while True:
            current, self._kept_version = self._kept_version, None
            if current is None or force or if_version not in (None, current.version):
                current = await self._settled_current(force=force)
            known = 0 if current is None else current.version if current.id else None
            if if_version is not None and if_version != known:
                raise self._conflict(if_version, current)
            try:
                written = await self._replace(current, plain)
            except Conflict as conflict:
                if if_version is not None and not self._is_at(conflict.current, if_version):
                    raise self._conflict(if_version, conflict.current) from None
                continue
            except BadDocument:
                continue  # what another program has written meanwhile is read, and refused
            return written

    def _is_at(self, current: Versioned | None, version: int) -> bool:
        return (0 if current is None else current.version) == version

    async def tidy(self, written: Versioned) -> None:
        """Copy the new version to the history, and delete what is older than it keeps. It is called
        after `write`, but nothing depends on it: if it fails, a later writer does it."""
        try:
            await self._copy(written)
            self._kept_version = written
            await self._trim(written.version, written.body["history"])
        except StoreError as error:
            log.debug("%s", log_line(event="history_not_tidied", config=self.name, error=error))

    async def _settled_current(self, *, force: bool) -> Versioned | None:
        """The current version, which the history has too if it can be read."""
        try:
            current = await self.current(unreadable=force)
            if current is not None and current.id:
                known = await self._get(config_key(self.name, "history", current.version))
                await self._copy(current, known)
        except OutcomeUnknown as error:
            raise StoreUnavailable(f"{self.name!r} was not written: {error}") from error
        return current

    async def _copy(self, current: Versioned, known: Entry | None = None) -> None:
        """Copy the current version to the history, which has `known` in its place. All writers that
        copy it write the same bytes, so it does not matter how often, or how late, that is carried
        out.

        Other bytes are those of a version that the store has lost since. The copy does not wait for
        the disk: the next version does, and no later write is on disk before an earlier one.
        """
        store, key = self.core.store, config_key(self.name, "history", current.version)
        while known is None or known.value != current.entry.value:
            if_version = None if known is None else known.version
            put = store.put_relaxed(key, current.entry.value, if_version=if_version)
            if await self.core.call(put) is not None:
                return
            known = await self._get(key)

    async def _replace(self, current: Versioned | None, plain: Any) -> Versioned:
        identity = self.core.calls.unique_id()
        body = {
            "author": self._author,
            "at": self.core.runtime.clock.wall(),
            "previous": "" if current is None else current.id,
            "history": self._kept(current),
            "value": plain,
        }
        try:
            return await self.document.write(body, expect=current, identity=identity)
        except OutcomeUnknown as error:
            # If later versions have replaced it, the history has it, or another one instead.
            version = 1 if current is None else current.version + 1
            try:
                found, now = await self.earlier(version), await self.document.read()
            except (StoreError, BadDocument):
                raise error from None
            if found is None:
                raise
            if found.id != identity:
                raise Conflict("another version was written", now) from None
            return found

    def _kept(self, current: Versioned | None) -> int:
        """How many earlier versions are kept: as many as before, unless this writer says how many.
        So a tool that writes once does not shorten the history of a service."""
        before = KEEP if current is None else current.body.get("history")
        return self._keep or (before if isinstance(before, int) and before > 0 else KEEP)

    async def _trim(self, version: int, keep: int) -> None:
        """Delete what is older than the history that is kept.

        Usually that is one version. A writer that died, or copied a version very late, may have
        left others, so all are looked through from time to time.
        """
        oldest = version - keep - 1
        expired = [config_key(self.name, "history", oldest)] if oldest > 0 else []
        if version % keep == 0:
            expired = [entry.key for entry in await self._history() if _number(entry) <= oldest]
        for key in expired:
            await self.core.call(self.core.store.delete(key))

    def _conflict(self, if_version: int, current: Versioned | None) -> Conflict:
        if current is None:
            return Conflict(f"{self.name!r} has no version {if_version}: nothing was written yet")
        if not current.id:
            return Conflict(
                f"{self.name!r} cannot be read, so it is not at version {if_version}; nothing was"
                " written. Repeat the change without a version"
            )
        now = self.plain(current)
        return Conflict(
            f"{self.name!r} is at version {now.version}, which {now.author!r} wrote at"
            f" {now.at:%Y-%m-%d %H:%M:%S} UTC, and not at {if_version}; nothing was written. Read"
            " it again, and repeat the change",
            now,
        )


class ConfigReader(Generic[T]):
    """Reads one version after the other, from any position. With `observes`, it also tells when the
    store does not answer for a ttl, and when it does again."""

    def __init__(self, store: ConfigStore[T], *, observes: bool = False) -> None:
        self.key = store.document.key
        self._store = store
        self._observes = observes
        self._notices: list[Change[T]] = []
        """That the store does not answer, or does again."""
        self._last: ConfigDocument[T] | None = None
        """The last version that was returned."""
        self._calls = store.core.calls
        self._watch: Watch | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._at: ReaderPosition | None = None
        """Where the reader was when `_changed` was cleared last."""
        self._unreadable = ""
        """What was reported last about a document that cannot be read."""
        self._doubtful_until: float | None = None
        self.took_s = 0.0
        """How long the last read took."""

    async def next(
        self, at: ReaderPosition | None
    ) -> tuple[Sequence[Change[T]], ReaderPosition | None]:
        """What has changed since the reader was `at`, and where it is then. Waits for a change.

        None is the position of a reader that begins with what is current. While the store is
        unavailable, this waits.
        """
        if self._observes and not self._closed:
            self._observes = False  # join only once
            self._calls.reachability.join(self)
        if at is not None and at == self._at:
            await self._changed.wait()
        while True:
            if self._notices:
                notices, self._notices = self._notices, []
                return notices, at
            try:
                if self._watch is None:
                    watching = self._calls.store.watch_entry(self.key, self._changed.set)
                    self._watch = await self._calls.call(watching)
                    if self._closed:
                        self.close()
                self._changed.clear()
                began = asyncio.get_running_loop().time()
                changes, position = await self._since(at)
                self.took_s = asyncio.get_running_loop().time() - began
            except (OutcomeUnknown, StoreUnavailable) as error:
                line = log_line(event="observing_failed", config=self._store.name, error=error)
                log.debug("%s", line)
                self._calls.reachability.failed(self, error)
                await asyncio.sleep(self._calls.retry_pause())
                continue
            self._calls.reachability.succeeded(self)
            if self._doubtful(changes):
                await asyncio.sleep(self._calls.retry_pause())
            elif changes:
                self._at = position
                for change in changes:
                    self._last = change if isinstance(change, ConfigDocument) else self._last
                notices, self._notices = self._notices, []
                return [*notices, *changes], position
            else:
                await self._changed.wait()

    def close(self) -> None:
        self._closed = True
        self._calls.reachability.leave(self)
        if self._watch is not None:
            self._watch.close()

    def unreachable(self, since: float, error: str) -> None:
        """The store has not answered for a ttl."""
        self._notice(Unreachable(since, self._last, error))

    def reachable(self) -> None:
        """The store answers again."""
        self._notice(Reachable(self._store.core.runtime.clock.wall()))

    def read_again(self) -> None:
        """The store answers with an error, which is raised by the next read."""
        self._changed.set()

    def _notice(self, notice: Notice[T]) -> None:
        self._notices.append(notice)
        self._changed.set()

    def _doubtful(self, changes: Sequence[Change[T]]) -> bool:
        """Whether an outdated replica may have answered, so that versions seem to be lost. Versions
        that are still missing after one ttl are lost."""
        notices = any(isinstance(change, Missed | Regressed) for change in changes)
        if not notices or self._calls.store.capabilities.linearizable_reads:
            self._doubtful_until = None
            return False
        now = asyncio.get_running_loop().time()
        if self._doubtful_until is None:
            self._doubtful_until = now + self._calls.timing.ttl_s
        return now < self._doubtful_until

    async def _since(
        self, at: ReaderPosition | None
    ) -> tuple[Sequence[Change[T]], ReaderPosition | None]:
        try:
            current = self._carried(at) or await self._store.current()
        except BadDocument as error:
            if at is not None or (newest := await self._store.newest_kept()) is None:
                return self._report_unreadable(error), at
            versions, _ = await self._follow(None, newest)  # the last good one is in force
            seen = [*await self._typed(versions), *self._report_unreadable(error)]
            return seen, ReaderPosition(newest.version, newest.id)
        self._unreadable = ""
        if current is None:
            # Nothing was written yet, or everything is lost.
            lost = at is not None and at.version > 0
            return ([Regressed(at.version, 0)] if at and lost else []), at and ReaderPosition(0)
        if at is not None and at.is_at(current):
            return [], at
        versions, changes = await self._follow(at, current)
        seen = [*changes, *await self._typed(versions)]
        return seen, ReaderPosition(current.version, current.id)

    def _carried(self, at: ReaderPosition | None) -> Versioned | None:
        """The current version, if the last notification carried it, and it is not an earlier one
        than the reader has."""
        entry = None if self._watch is None else self._calls.store.carried(self._watch)
        if entry is None or at is None:
            return None
        try:
            current = Versioned.decode(entry)
            self._store.plain(current)
        except BadDocument:
            return None  # a read reports what is wrong with it
        return current if current.version > at.version or at.is_at(current) else None

    def _report_unreadable(self, error: BadDocument) -> Sequence[Change[T]]:
        """Report what is not a document of doyen, once: it has no identity."""
        if str(error) == self._unreadable:
            return []
        self._unreadable = str(error)
        return [error]

    async def _follow(
        self, at: ReaderPosition | None, current: Versioned
    ) -> tuple[list[Versioned], list[Change[T]]]:
        """The versions from `at` to the current one in order, and what precedes them."""
        versions = [current]
        if at is None:
            # The last good version is in force, and it may be an earlier one.
            while isinstance(await self._store.typed_aside(versions[0]), BadDocument):
                earlier = await self._before(versions[0])
                if earlier is None:
                    break
                versions.insert(0, earlier)
            return versions, []
        if current.version <= at.version:
            return versions, [Regressed(at.version, current.version)]
        while versions[0].version > at.version + 1:
            earlier = await self._before(versions[0])
            if earlier is None:
                return versions, [Missed(at.version + 1, versions[0].version - 1)]
            versions.insert(0, earlier)
        if at.id not in ("", versions[0].body.get("previous")):
            return [current], [Regressed(at.version, current.version)]
        return versions, []

    async def _before(self, version: Versioned) -> Versioned | None:
        """The version before it, from the history; None if that does not have it."""
        try:
            earlier = await self._store.earlier(version.version - 1)
        except BadDocument:
            return None
        if earlier is None or earlier.id != version.body.get("previous"):
            return None
        return earlier

    async def _typed(self, versions: list[Versioned]) -> list[ConfigDocument[T] | BadDocument]:
        return [await self._store.typed_aside(version) for version in versions]
