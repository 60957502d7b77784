"""Publishing the members of a group as one document, written by a leader under its token.

Only the leader observes the members themselves; all other processes read or observe the document
`published/<group>`. Its position (token, version) only increases.

- The first act of a new leader is to write, so that a predecessor that was paused cannot: its token
  is lower than that of the document from then on.
- The leader does not read the members again before the outcome of its write is known. No write that
  is carried out late can therefore list a member that its writer has seen to be gone.
- Changes within `settle_s` are published together.
- The leader watches the document as well. What another program has written there is replaced,
  unless its token is higher than the leader's: a later leader may have written that. The leader
  reports it, and publishes again once it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from doyen.election.core import SessionCore
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    OutcomeUnknown,
    StaleToken,
    StoreError,
    StoreUnavailable,
)
from doyen.events import PublishFailed
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned
from doyen.manage.roster import Roster, read_members
from doyen.model import Member, Published, Unreachable, members_key, published_key
from doyen.stores.port import Watch
from doyen.term import Term

__all__ = ["ListPublisher", "observe_published", "read_published"]

log = logging.getLogger("doyen")
SETTLE_S = 0.1


class ListPublisher:
    """Publishes the members of one group during one term. Used on doyen's loop."""

    def __init__(
        self, core: SessionCore, group: str, term: Term, settle_s: float | None = None
    ) -> None:
        settle: object = SETTLE_S if settle_s is None else settle_s
        if not isinstance(settle, int | float) or not 0 <= settle < float("inf"):
            raise ConfigError(f"settle_s is 0 s or more, not {settle_s!r}")
        self.core = core
        self.group = group
        self.term = term
        self.published: Versioned | None = None
        """What this leader published last."""
        self._settle_s = float(settle)
        self._prefix = members_key(group)
        self._document = Document(core.calls, published_key(group))
        self._error = ""
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish in the background, until stopped or the term is over."""
        self._running = self.core.tasks.start(self.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def run(self) -> None:
        """Publish until cancelled or the term is over."""
        core, changed = self.core, asyncio.Event()
        watches: list[Watch] = []
        due: Roster | None = None
        """What is being written, or was. It is written before the members are read again."""
        outdated = False

        def members_changed() -> None:
            nonlocal outdated
            outdated = True
            changed.set()

        scopes = ((self._prefix, members_changed), (self._document.key, changed.set))
        try:
            while self.term.valid:
                try:
                    for scope, notify in scopes[len(watches) :]:
                        watches.append(await core.call(core.store.watch(scope, notify)))
                    if due is None:
                        outdated = False
                        due = await read_members(core, self.group)
                    changed.clear()
                    await self._publish(due)
                except (StoreUnavailable, OutcomeUnknown) as error:
                    line = log_line(event="publish_failed", group=self.group, error=error)
                    log.debug("%s", line)
                    await asyncio.sleep(core.calls.retry_pause())
                    continue
                except StaleToken as error:
                    if self.term.valid:
                        self._failed(
                            f"{error}. If no later leader has written it, another program has:"
                            " delete that key, and the list is published again"
                        )
                except (ConfigError, StoreError) as error:
                    self._failed(str(error))  # too large, for instance: until something changes
                else:
                    self._error = ""
                if not outdated:
                    await changed.wait()
                await asyncio.sleep(self._settle_s)
                if outdated:
                    due = None
        finally:
            for watch in watches:
                watch.close()

    def _failed(self, error: str) -> None:
        """Report an error, once until it is another."""
        if error != self._error:
            self._error = error
            self.core.telemetry.emit(PublishFailed(group=self.group, error=self._error))

    async def _publish(self, roster: Roster) -> None:
        members = [encode_member(member) for member in roster.members.values()]
        while True:
            current = await self._current()
            if (
                current is not None
                and current.token == self.term.token
                and current.body.get("members") == members
            ):
                self.published = current
                return
            if not self.term.valid:
                return
            if current is not None and self.published is not None:
                # The version increases, also if another program has written a lower one.
                version = max(current.version, self.published.version)
                current = current._replace(version=version)
            try:
                self.published = await self._document.write(
                    {"group": self.group, "members": members},
                    expect=current,
                    token=self.term.token,
                )
                return
            except Conflict:
                continue  # a predecessor has written meanwhile

    async def _current(self) -> Versioned | None:
        entry = await self.core.call(self.core.store.get(self._document.key))
        if entry is None:
            return None
        try:
            return Versioned.decode(entry)
        except BadDocument:
            # No process can read it. A leader replaces it, based on the members of the group.
            return Versioned.unreadable(entry)


def encode_member(member: Member) -> dict[str, Any]:
    """A member as it is published."""
    return {
        "name": member.name,
        "incarnation": member.incarnation,
        "state": member.state,
        "reason": member.reason,
        "since": member.since,
        "meta": dict(member.meta),
    }


def decode_member(raw: Mapping[str, Any]) -> Member:
    return Member(
        str(raw["name"]),
        int(raw["incarnation"]),
        raw["state"],
        str(raw["reason"]),
        dict(raw["meta"]),
        float(raw["since"]),
    )


def published_of(group: str, document: Versioned, *, regressed: bool = False) -> Published:
    """Raises `BadDocument` if the document is not a list of members."""
    try:
        members = tuple(decode_member(each) for each in document.body["members"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadDocument(
            f"the published list of {group!r}, version {document.version}, cannot be read:"
            f" {error!r}"
        ) from error
    return Published(group, document.token, document.version, members, regressed)


async def read_published(core: SessionCore, group: str) -> Published | None:
    """The members of a group as its leader published them; None if none did."""
    document = await Document(core.calls, published_key(group)).read()
    return None if document is None else published_of(group, document)


async def observe_published(
    core: SessionCore,
    group: str,
    deliver: Callable[[Published | Unreachable[Published] | None], None],
) -> None:
    """Deliver the published list, then every change, until cancelled. A list that cannot be read is
    not delivered: the last good one stays in force."""

    last: Published | None = None

    def changed(document: Versioned | BadDocument | None, regressed: bool) -> None:
        nonlocal last
        if document is None:
            last = None
            deliver(None)
        elif isinstance(document, Versioned):
            try:
                published = published_of(group, document, regressed=regressed)
            except BadDocument as error:
                bad(error)
            else:
                last = published
                deliver(published)
        else:
            bad(document)

    def bad(error: BadDocument) -> None:
        core.telemetry.emit(PublishFailed(group=group, error=str(error)))

    def unreachable(seen: Unreachable[Any]) -> None:
        deliver(Unreachable(seen.since, last, seen.error))

    await Document(core.calls, published_key(group)).observe(changed, unreachable)
