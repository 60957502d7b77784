"""Versioned documents: a JSON object at one key, replaced by compare-and-set.

Published lists, configurations, and the spec and plan of shards are documents:

    {"schema": 1, "version": 7, "id": "5f0c…", "token": 41, …body}

- `version` begins at 1 and increases by one with each write.
- `id` is random and identifies the write. After a lost response it tells the writer whether the
  document that is there is its own.
- `token` is the fencing token of a leader that wrote it. A write with a lower token is refused, so
  once a new leader has written, its predecessor cannot. Other documents have 0.

A document is never deleted. One whose version or token is not higher than that of the document that
an observer had before comes from a store that lost confirmed writes; the observer is told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from doyen.election.queries import observe
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    OutcomeUnknown,
    StaleToken,
    StoreUnavailable,
)
from doyen.lease.keeper import StoreCalls
from doyen.model import Entry, Unreachable, encode_json

__all__ = ["Document", "Versioned"]

SCHEMA = 1
_ENVELOPE = frozenset({"schema", "version", "id", "token"})


class Versioned(NamedTuple):
    """One version of a document."""

    body: Mapping[str, Any]
    version: int
    id: str
    token: int
    entry: Entry
    """As the store has it: `entry.value` are the bytes, `entry.version` is the store's version."""

    @classmethod
    def decode(cls, entry: Entry) -> Versioned:
        """Raises `BadDocument` if the entry is not a document of a known schema."""
        try:
            raw = json.loads(entry.value)
            schema, version, token = int(raw["schema"]), int(raw["version"]), int(raw["token"])
            identity = str(raw["id"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadDocument(
                f"{entry.key} is not a document of doyen: {error!r}; another program has written it"
            ) from error
        if schema > SCHEMA:
            raise BadDocument(
                f"{entry.key} has schema {schema}, and this release knows {SCHEMA}: upgrade doyen"
            )
        body = {name: value for name, value in raw.items() if name not in _ENVELOPE}
        return cls(body, version, identity, token, entry)

    @classmethod
    def unreadable(cls, entry: Entry) -> Versioned:
        """Stands in for a document that cannot be read, so that it can be replaced."""
        return cls({}, 0, "", 0, entry)


Observed = Versioned | BadDocument | None


class Document:
    """The document at one key. Used on doyen's loop."""

    def __init__(self, calls: StoreCalls, key: str, *, durable: bool = True) -> None:
        """With `durable` false a crash of the machine may undo what was written last."""
        self.key = key
        self._calls = calls
        self._put = calls.store.put if durable else calls.store.put_relaxed

    async def read(self, known: Versioned | None = None) -> Versioned | None:
        """The current version, or None. Raises `BadDocument` if it cannot be read. If it is still
        `known`, that is returned: a large document is not decoded again."""
        entry = await self._calls.call(self._calls.store.get(self.key))
        if known is not None and entry == known.entry:
            return known
        return None if entry is None else Versioned.decode(entry)

    async def write(
        self,
        body: Mapping[str, Any],
        *,
        expect: Versioned | None,
        token: int = 0,
        identity: str | None = None,
    ) -> Versioned:
        """Replace `expect`, or create the document if that is None.

        `identity` is the id of the new version, for a caller that has other ways to find it.

        Raises `Conflict` if the document is another one by now, and `StaleToken` if `token` is
        lower than that of `expect`; then nothing was written. An unknown outcome is resolved by
        reading, for up to one ttl. `OutcomeUnknown` is raised if that is not possible: the store
        does not answer, or further versions were written since.
        """
        calls, last = self._calls, expect
        if last is not None and last.token > token:
            raise StaleToken(
                f"{self.key} was written with token {last.token}; the token {token} is of an"
                " earlier term"
            )
        version = (last.version if last else 0) + 1
        identity = identity or calls.unique_id()
        value = self._encode(
            {"schema": SCHEMA, "version": version, "id": identity, "token": token, **body}
        )
        known = None if last is None else last.entry.version
        in_doubt: OutcomeUnknown | None = None
        until = asyncio.get_running_loop().time() + calls.timing.ttl_s
        while True:
            try:
                current = await self.read() if in_doubt else last
                if (current and current.entry.version) == known:
                    entry = await calls.call(self._put(self.key, value, if_version=known))
                    if entry is not None:
                        return Versioned.decode(entry)
                    current = await self.read()
            except OutcomeUnknown as error:
                in_doubt = error
            except StoreUnavailable:
                if in_doubt is None:
                    raise
            else:
                if current is not None and current.id == identity:
                    return current
                if (current and current.entry.version) != known:
                    if in_doubt and current is not None and current.version > version:
                        raise OutcomeUnknown(
                            f"version {version} of {self.key} may have been written, and version"
                            f" {current.version} has followed it"
                        ) from in_doubt
                    raise Conflict(
                        f"{self.key} has been changed:"
                        f" {'it is gone' if current is None else f'version {current.version}'}"
                        f" instead of {version - 1}; read it again, and repeat the change",
                        current,
                    )
                # The write was refused, and an outdated replica answered the read: read again.
            if asyncio.get_running_loop().time() >= until:
                raise OutcomeUnknown(
                    f"the store did not report whether version {version} of {self.key} was written"
                ) from in_doubt
            await asyncio.sleep(calls.retry_pause())

    def _encode(self, document: Mapping[str, Any]) -> bytes:
        try:
            value = encode_json(document)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.key} must be what JSON can represent: {error}") from error
        limits = self._calls.store.capabilities
        if len(value) > limits.value_bytes:
            raise ConfigError(
                f"{self.key} would take {len(value)} bytes, more than {limits.value_bytes}"
                f" ({limits.value_limit}); nothing was written. Store large values elsewhere, and"
                " put a reference to them here"
            )
        return value

    async def observe(
        self,
        deliver: Callable[[Versioned | BadDocument | None, bool], None],
        unreachable: Callable[[Unreachable[Any]], None] = lambda _: None,
    ) -> None:
        """Deliver the current version, then every change, until cancelled.

        The second argument is True if the document went back: a confirmed write has been lost, or
        (with `linearizable_reads` false) an outdated replica has answered. Changes that follow one
        another closely are delivered as one. When the store has not answered for a ttl,
        `unreachable` is called, and the document is delivered once more when it answers again.
        """
        last: Versioned | None = None

        async def read() -> Versioned | BadDocument | None:
            try:
                return await self.read(last)
            except BadDocument as error:
                # Each is a new exception; it is reported once.
                return bad if bad is not None and str(bad) == str(error) else error

        bad: BadDocument | None = None

        def changed(now: Observed | Unreachable[Observed]) -> None:
            nonlocal last, bad
            if isinstance(now, Unreachable):
                unreachable(now)
                return
            bad = now if isinstance(now, BadDocument) else None
            before = last
            if isinstance(now, BadDocument):
                deliver(now, False)
                return
            last = now
            deliver(now, before is not None and went_back(before, now))

        await observe(self._calls, [self.key], read, changed)


def went_back(before: Versioned, now: Versioned | None) -> bool:
    """Whether `now`, read after `before`, is not a later version of it."""
    if now is None:
        return True
    return now.id != before.id and (now.version <= before.version or now.token < before.token)
