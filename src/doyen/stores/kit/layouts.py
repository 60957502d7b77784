"""Lines in the layout of another program, so that its candidates and doyen's wait in one line.

In doyen's own layout a leader has two entries, a ticket and the leader record. Other programs have
one: *the first in line leads*. `LineLayout` maps the port to that:

    elections/NAME/line/X    the entry X of the line that the other program knows as NAME
    elections/NAME/leader    the first entry of that line, while it is there

The same line serves the election and the lock of a name, as it does there. All other keys of the
port have no place in such a layout: writing them is refused, and those of an election (orders,
notices) are absent.

Why the first in line may lead: an entry joins at the end, and leaves only when it is deleted or its
lease ends. So the first entry stays first for as long as it exists, and a read that shows it
decides the election, as a creation does otherwise. The token is the revision of the entry's
creation. The line is in the order of these, so each leader has a greater one than those before it.

A lease has one entry in a line at most, so each candidate needs a lease of its own
(`Capabilities.layout`). A candidate of doyen is recognised by its claim, which the adapter keeps
apart from what the other program reads. Every other candidate is *foreign*: its claim has no
attempt.

Imports the port, the model and the errors.
"""

from __future__ import annotations

from abc import abstractmethod
from builtins import list as list_
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, NoReturn
from urllib.parse import unquote

from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.model import Claim, Entry, Finding, Lease, Version
from doyen.stores.kit.lifecycle import GuardedStore, WatchHandle
from doyen.stores.port import Creation, Watch

__all__ = ["LineLayout", "Place", "foreign_claim", "place_of", "plain_claim"]

_KINDS = ("elections", "locks")
_SHOWN_KINDS = {
    "": "lists of elections",
    "challenges": "members",
    "config": "configurations",
    "elections": "lists of elections",
    "locks": "lists of locks",
    "published": "published lists",
    "runs": "schedules",
    "trails": "the history of terms",
}
"""How the kinds of keys that are refused are called in errors, if not by their own name."""
_SHOWN = 1000
"""How many bytes of a foreign candidate's value are shown as its name."""


class Place(NamedTuple):
    """A key of the port, in the terms of a layout."""

    line: str
    """The key of its line."""
    name: str
    """What the other program calls the election or the lock."""
    part: str
    """`leader`, `line`, `ticket`; empty for what is absent in a layout."""
    ticket: str = ""
    """The last part of a ticket's key."""


def place_of(key: str, layout: str) -> Place:
    """
    >>> place_of("elections/%2Fapp%2Fe/line/694d", "concurrency")
    Place(line='elections/%2Fapp%2Fe/line', name='/app/e', part='ticket', ticket='694d')
    """
    kind, name, part, rest = (*key.split("/", 3), "", "", "")[:4]
    if kind not in _KINDS or not name:
        refuse(layout, _SHOWN_KINDS.get(kind, kind))
    if part == "line" and rest:
        part = "ticket"
    elif part not in ("leader", "line") or rest:
        part, rest = "", ""
    return Place(f"{kind}/{name}/line", unquote(name), part, rest)


def refuse(layout: str, what: str) -> NoReturn:
    """Refuse what the layout of another program has no place for."""
    raise StoreUnusable(
        f"layout={layout} has no place for {what}: other programs know elections and locks only;"
        " leave out layout= to use doyen's own layout"
    )


def plain_claim(value: bytes, layout: str) -> Claim:
    """The claim of a candidate. Raises `ConfigError` if the layout cannot carry it."""
    claim = Claim.decode(value)
    if claim.rank:
        raise ConfigError(
            f"layout={layout} has no priorities: other programs order candidates by their arrival"
            " only; leave out priority="
        )
    return claim


def foreign_claim(text: bytes | str) -> bytes:
    """The claim of a candidate of another program, from the text by which it shows itself.

    >>> Claim.decode(foreign_claim(b'{"name": "x", "attempt": "y"}')).attempt
    ''
    """
    shown = text if isinstance(text, str) else text[:_SHOWN].decode(errors="replace")
    return Claim(shown, "", {}).encode()


class LineLayout(GuardedStore):
    """The port on lines of another program. An adapter implements the operations on a line; the
    `version` of a ticket is its own."""

    layout: ClassVar[str]
    foreign: ClassVar[str]
    """What the candidates of the other program are called."""
    lacks: ClassVar[str]
    """What these candidates do not guarantee."""

    @abstractmethod
    async def _join(self, line: str, value: bytes, lease: Lease) -> Entry:
        """Join the end of a line. If the lease has an entry there, return that."""

    @abstractmethod
    async def _first(self, line: str) -> Entry | None:
        """The first ticket of a line."""

    @abstractmethod
    async def _before(self, ticket: Entry) -> Entry | None:
        """The ticket directly before this one. Raises `TicketGone`."""

    @abstractmethod
    async def _all(self, line: str) -> list_[Entry]:
        """All tickets of a line, in order."""

    @abstractmethod
    async def _ticket(self, key: str) -> Entry | None:
        """The ticket at a key."""

    @abstractmethod
    async def _replace(self, ticket: Entry, value: bytes) -> Entry | None:
        """Replace the claim of a ticket that has this version."""

    @abstractmethod
    async def _remove(self, key: str, version: Version | None) -> bool:
        """Delete a ticket, if it has this version where that is given."""

    @abstractmethod
    async def _watch(self, place: Place, notify: Callable[[], None]) -> Watch:
        """Watch a ticket, or a whole line."""

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        place = self._place(key)
        if place.part != "leader":
            refuse(self.layout, "orders and transfers")
        first = await self._first(place.line)
        if first is None:
            # A candidate with the recipe `race`, or one whose ticket was removed.
            ticket = await self._join(place.line, value, lease)
            first = await self._first(place.line)
            if first is None:
                raise StoreUnavailable(f"{ticket.key} was removed by another process")
            if first.lease != lease.id:
                await self._remove(ticket.key, ticket.version)
        if first.lease != lease.id:
            return Creation(False, _record(key, first))
        return Creation(True, _record(key, first)._replace(value=value))

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        self._place(key)
        refuse(self.layout, "entries without a lease")

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        place = self._place(entry.key)
        if place.part != "leader":
            return None
        key, version = _ticket_of(entry.version)
        replaced = await self._replace(entry._replace(key=key, version=version), value)
        return None if replaced is None else _record(entry.key, replaced)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        place, version = self._place(key), if_version
        if place.part == "leader":
            if if_version is None:
                first = await self._first(place.line)
                if first is None:
                    return False
                key, version = first.key, first.version
            else:
                key, version = _ticket_of(if_version)
        return bool(place.part) and await self._remove(key, version)

    def begin_deletion(self, entries: Sequence[Entry]) -> None:
        """The keys have to be translated, for which some entries are read."""

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if self._place(line).part != "line":
            refuse(self.layout, "lines other than those of elections and locks")
        plain_claim(value, self.layout)
        return await self._join(line, value, lease)

    create_and_look = GuardedStore.create_and_look  # in terms of the operations of this class

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._before(ticket)

    async def get(self, key: str) -> Entry | None:
        place = self._place(key)
        if place.part == "leader":
            first = await self._first(place.line)
            return None if first is None else _record(key, first)
        return await self._ticket(key) if place.part == "ticket" else None

    async def list(self, prefix: str) -> list_[Entry]:
        return await self._all(prefix) if self._place(prefix).part == "line" else []

    async def head(self, line: str) -> Entry | None:
        self._place(line)
        return await self._first(line)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        place = self._place(scope)
        if place.part:
            return await self._watch(place, notify)
        return WatchHandle(scope, notify, lambda _: None)

    def _place(self, key: str) -> Place:
        self._require_usable()
        return place_of(key, self.layout)

    def _findings(self) -> Finding:
        """The finding for `doyen doctor`."""
        return layout_finding(self.layout, self.foreign, self.lacks)


def layout_finding(layout: str, foreign: str, lacks: str) -> Finding:
    return Finding.warning(
        f"layout={layout}",
        f"{foreign} may lead too, and promise less: {lacks}",
        "let resources check tokens, and move the other candidates to doyen",
    )


def _record(key: str, ticket: Entry) -> Entry:
    """The first ticket of a line as the leader record. Its version names the ticket."""
    return ticket._replace(key=key, version=(ticket.key, ticket.version))


def _ticket_of(version: Version) -> tuple[str, Version]:
    assert isinstance(version, tuple)
    key, own = version
    return key, own
