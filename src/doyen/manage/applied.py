"""Acknowledgements: what each subscriber of a configuration has applied, and waiting for them.

    config/<name>/applied/<subscriber>   {schema, name, version, id, refused}

A subscriber has one such entry, bound to a lease that serves nothing else and ends with the
subscription. So nothing remains of a subscriber that has left or died, and no request of it that is
carried out late can bring its entry back. After the loss of its lease a subscriber has another
entry on another lease: the one before counts as gone.

A writer that waits lists the entries after its write. It waits until each of these subscribers has
reached the version, refused it, or gone. Those that come later are not waited for: they begin with
the new version. The writer has one watch, on the key above them, and lists them again while they
change, at most half of the time: a hundred acknowledgements that arrive together cost it a few
lists.

All subscribers read a new version at the same time. Each waits as long as its read took before it
acknowledges the version. So the last reads are answered before the acknowledgements of the first
subscribers load the store.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from doyen.election.core import SessionCore
from doyen.errors import (
    BadDocument,
    ConfigError,
    LeaseGone,
    NotApplied,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from doyen.events.log_lines import log_line
from doyen.lease.keepalive import Keepalive
from doyen.manage.documents import Document, Versioned
from doyen.model import Entry, config_key, encode_json
from doyen.stores.port import Watch

__all__ = ["Acknowledgement", "Applied", "WaitApplied", "check_wait", "wait_until_applied"]

log = logging.getLogger("doyen")

WaitApplied = Literal["all", "majority"]
REASON_CHARACTERS = 1000
"""How much is kept of the reason for which a document was refused."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""How long an acknowledgement is held back, and its writer waits for more of them before it reads
them."""


def _pause(took_s: float) -> float:
    return min(max(took_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


class Refusal(NamedTuple):
    """The newest version that a subscriber has refused."""

    version: int
    id: str
    reason: str


class Applied(NamedTuple):
    """The value of a subscriber's entry."""

    name: str
    version: int = 0
    """The version in force; 0 if the subscriber has not applied any yet."""
    id: str = ""
    refused: Refusal | None = None

    def encode(self) -> bytes:
        refused = None if self.refused is None else self.refused._asdict()
        return encode_json({"schema": 1, **self._asdict(), "refused": refused})

    @classmethod
    def decode(cls, entry: Entry) -> Applied:
        """Read an acknowledgement. A value that is not one counts as that of a subscriber that has
        applied no version."""
        try:
            raw = json.loads(entry.value)
            refused = raw["refused"]
            if refused is not None:
                refused = Refusal(
                    int(refused["version"]), str(refused["id"]), str(refused["reason"])
                )
            return cls(str(raw["name"]), int(raw["version"]), str(raw["id"]), refused)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return cls(entry.key.rpartition("/")[2])


class Acknowledgement:
    """The entry of one subscriber, kept up to date in the store. Used on doyen's loop."""

    def __init__(self, core: SessionCore, config: str, name: str) -> None:
        self._core = core
        self._config = config
        self.read_took_s = 0.0
        """How long it took to read the document that was delivered last."""
        self._says = Applied(name)
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._keepalive: Keepalive | None = None
        self._entry: Entry | None = None
        self._key = ""
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Write the entry, and keep it up to date from then on. Waits for the store."""
        task = self._task = self._core.tasks.start(self._keep())
        written = asyncio.ensure_future(self._written.wait())
        try:
            await asyncio.wait({task, written}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            task.cancel()
            raise
        finally:
            written.cancel()
        if task.done():
            task.result()  # raises what retrying does not cure

    def applied(self, version: int, identity: str) -> None:
        """The subscriber has applied a version."""
        self._says = self._says._replace(version=version, id=identity)
        self._changed.set()

    def refused(self, version: int, identity: str, reason: str) -> None:
        """The subscriber has refused a version. The one before stays in force."""
        refusal = Refusal(version, identity, reason[:REASON_CHARACTERS])
        self._says = self._says._replace(refused=refusal)
        self._changed.set()

    async def close(self) -> None:
        """Remove the entry. If the store does not answer, it goes with the lease."""
        if self._task is not None:
            self._task.cancel()
            self._release()
            await asyncio.wait({self._task})
        if self._ending is not None:
            await asyncio.wait({self._ending})

    def _release(self) -> None:
        """End the lease, in the background, and with it the entry."""
        keepalive, self._keepalive, self._entry = self._keepalive, None, None
        if keepalive is not None:
            keepalive.forget(self)
            if not self._core.closed:  # a session that is closed ends its leases itself
                self._ending = self._core.leases.release(keepalive)

    async def _keep(self) -> None:
        try:
            while not self._core.closed:
                self._changed.clear()
                try:
                    await self._write(self._says)
                except LeaseGone as error:
                    if self._keepalive is not None:
                        self._keepalive.lose(str(error))
                except (OutcomeUnknown, StoreUnavailable) as error:
                    line = log_line(event="not_acknowledged", config=self._config, error=error)
                    log.debug("%s", line)
                    await asyncio.sleep(self._core.calls.retry_pause())
                else:
                    self._written.set()
                    await self._changed.wait()
                    await asyncio.sleep(_pause(self.read_took_s))
        finally:
            self._release()

    async def _write(self, says: Applied) -> None:
        """Have the entry say this. After an unknown outcome the entry is read before anything else
        is tried."""
        core, value = self._core, says.encode()
        if self._keepalive is None or self._keepalive.lost_because is not None:
            self._release()
            self._keepalive = await core.leases.own()
            self._key = config_key(self._config, "applied", core.next_attempt())
            self._keepalive.on_loss(self, self._changed.set)
        if self._entry is None:
            lease = self._keepalive.lease
            self._entry = (await core.call(core.store.create(self._key, value, lease))).entry
        while self._entry.value != value:
            entry, self._entry = self._entry, None
            self._entry = await core.call(core.store.update(entry, value))
            if self._entry is None:
                self._entry = await core.call(core.store.get(self._key))
            if self._entry is None:
                raise LeaseGone(f"the entry {self._key} is gone, and so is its lease")


def check_wait(how: WaitApplied | None, wait_s: float) -> None:
    """Raise `ConfigError` for invalid options."""
    if how not in (None, "all", "majority"):
        raise ConfigError(f"wait_applied is 'all', 'majority' or None, not {how!r}")
    seconds: object = wait_s
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigError(f"wait_s is 0 s or more, not {wait_s!r}")


Outcome = Literal["waiting", "applied", "refused", "gone"]


class _Awaited:
    """A subscriber that a writer waits for."""

    def __init__(self, entry: Entry) -> None:
        self.key = entry.key
        self.revision = entry.revision
        self.says = Applied.decode(entry)
        self.outcome: Outcome = "waiting"


class _Waiting:
    """Waits until subscribers have applied a version."""

    def __init__(
        self, core: SessionCore, config: str, current: Document, written: Versioned
    ) -> None:
        self._core = core
        self._prefix = config_key(config, "applied")
        self._current = current
        self._written = written
        self._latest = written.version
        """The highest version that is known to have been written."""
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self.subscribers: list[_Awaited] | None = None
        """The set that is waited for, once it is fixed."""

    async def wait(self, how: WaitApplied, until: float) -> bool:
        """Wait until enough have applied it. False at `until`, or when no answer is open any more.
        Raises the store's error if it did not answer until then, so that it is not known which
        subscribers there are."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    pause_s = await self._look()
                except (OutcomeUnknown, StoreUnavailable):
                    if self.subscribers is None and loop.time() >= until:
                        raise
                    self._changed.set()
                    pause_s = self._core.calls.retry_pause()
                else:
                    if self._enough(how):
                        return True
                    if not any(each.outcome == "waiting" for each in self.subscribers or ()):
                        return False
                if loop.time() >= until and self.subscribers is not None:
                    return False
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()
                await asyncio.sleep(pause_s)
        finally:
            if self._watch is not None:
                self._watch.close()

    async def _look(self) -> float:
        """Read all acknowledgements. Returns how long to pause before the next read, so that those
        that arrive meanwhile are read together."""
        core, loop = self._core, asyncio.get_running_loop()
        if self._watch is None:
            watching = core.store.watch(self._prefix, self._changed.set)
            self._watch = await core.call(watching)
        self._changed.clear()
        began = loop.time()
        entries = await core.call(core.store.list(self._prefix))
        if self.subscribers is None:
            self.subscribers = [_Awaited(entry) for entry in entries]
        found = {entry.key: entry for entry in entries}
        for subscriber in self.subscribers:
            if subscriber.outcome == "waiting":
                await self._judge(subscriber, found.get(subscriber.key))
        return _pause(loop.time() - began)

    def _enough(self, how: WaitApplied) -> bool:
        """Whether all, or most, of those that are left have applied the version."""
        left = [each for each in self.subscribers or () if each.outcome != "gone"]
        applied = sum(each.outcome == "applied" for each in left)
        return applied == len(left) if how == "all" else not left or 2 * applied > len(left)

    async def _judge(self, subscriber: _Awaited, entry: Entry | None) -> None:
        if entry is None or entry.revision != subscriber.revision:
            subscriber.outcome = "gone"
            return
        says = subscriber.says = Applied.decode(entry)
        if await self._reaches(says.version, says.id):
            subscriber.outcome = "applied"
        elif says.refused and await self._reaches(says.refused.version, says.refused.id):
            subscriber.outcome = "refused"

    async def _reaches(self, version: int, identity: str) -> bool:
        """Whether a version is the one that was written, or a later one. A higher version that has
        not been written yet is one that the store has lost."""
        if version <= self._written.version:
            return version == self._written.version and identity == self._written.id
        if version > self._latest:
            current = await self._current.read()
            self._latest = self._latest if current is None else max(self._latest, current.version)
        return version <= self._latest


async def wait_until_applied(
    core: SessionCore,
    config: str,
    current: Document,
    written: Versioned,
    how: WaitApplied,
    wait_s: float,
) -> None:
    """Wait until the subscribers have applied the version. Raises `NotApplied` otherwise."""
    waiting = _Waiting(core, config, current, written)
    until = asyncio.get_running_loop().time() + wait_s
    try:
        if await waiting.wait(how, until):
            return
    except (StoreError, BadDocument) as error:
        raise NotApplied(
            f"version {written.version} of {config!r} was written, and whether its subscribers have"
            f" applied it is not known: {error}"
        ) from error
    raise _not_applied(config, written, waiting.subscribers or (), wait_s)


def _not_applied(
    config: str, written: Versioned, subscribers: Sequence[_Awaited], wait_s: float
) -> NotApplied:
    refused = {
        each.says.name: each.says.refused.reason
        for each in subscribers
        if each.outcome == "refused" and each.says.refused
    }
    waiting = [each.says.name for each in subscribers if each.outcome == "waiting"]
    said = [
        *(f"{name!r} refused it ({reason})" for name, reason in refused.items()),
        *(f"{name!r} has not applied it within {wait_s:g} s" for name in waiting),
    ]
    return NotApplied(
        f"version {written.version} of {config!r} was written and stays, but {', '.join(said)}",
        refused,
        waiting,
    )
