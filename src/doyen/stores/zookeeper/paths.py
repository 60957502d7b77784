"""Where the port's keys lie in ZooKeeper's tree. Pure: names in, names out.

An election has one persistent znode, and in it what an operator knows from ZooKeeper's recipes:

    /chroot/app/leader_election                      the election "/app/leader_election"
    /chroot/app/leader_election/guid_0000000001      a ticket; guid_5_0000000002 has the rank 5
    /chroot/app/leader_election/leader               the leader record
    /chroot/app/leader_election/leader:/order        what lies under the key `…/leader`
    /chroot/elections/billing/…                      the election "billing"
    /chroot/doyen/locks/migration/…                  every other kind
    /chroot/doyen/leases/0x1000…                     what a lease is renewed by

An ephemeral znode has no children, so a key and what lies under it are two znodes: `leader` and
`leader:`. Keys that an election does not ordinarily have begin with a colon there, so that a
further election may be nested in it: "/app" beside "/app/leader_election".

No two keys share a znode. A key's segments come percent-encoded; whatever else could be misread,
and a name that is one of ours, is written with `=` and two hexadecimal digits for the first such
byte or character: the election "/app/leader" lies in `/chroot/app/=6Ceader`.

Imports the errors and the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

from doyen.errors import ConfigError

__all__ = ["Layout", "Leaf", "in_line", "is_ticket", "ticket_stem"]

_TICKET = re.compile(r"guid_(?:(-?[1-9]\d*)_)?(\d{10})")
_PLAIN = re.compile(r"[A-Za-z0-9_.~%-]")
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")

_ELECTIONS = "elections"
_OURS = "doyen"
_TOP = frozenset({_ELECTIONS, _OURS, "zookeeper"})
_LEASES = "leases"


def is_ticket(name: str) -> bool:
    """Whether a znode's name is that of a ticket.

    >>> is_ticket("guid_0000000007"), is_ticket("guid_-2_0000000008"), is_ticket("leader")
    (True, True, False)
    """
    return _TICKET.fullmatch(name) is not None


def ticket_stem(rank: int) -> str:
    """What ZooKeeper appends the ten digits to."""
    return f"guid_{rank}_" if rank else "guid_"


def in_line(names: Iterable[str]) -> list[str]:
    """The tickets among the names, as they stand in line.

    >>> in_line(["guid_0000000009", "leader", "guid_3_0000000012", "guid_0000000002"])
    ['guid_3_0000000012', 'guid_0000000002', 'guid_0000000009']
    """
    tickets = [
        (-int(match[1] or 0), int(match[2]), name)
        for name in names
        if (match := _TICKET.fullmatch(name))
    ]
    return [name for _, _, name in sorted(tickets)]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A znode that holds an entry."""

    key: str
    path: str


_Zone = Literal["root", "kind", "election", "line", "inner"]


@dataclass(frozen=True, slots=True)
class _Room:
    """A znode that entries lie in, and the key that they lie under."""

    path: str
    key: str
    zone: _Zone
    nested: bool = False
    """Elections whose names go on from here count too."""


class Layout:
    """The tree below a chroot, itself empty or a path without a slash at its end."""

    def __init__(self, chroot: str) -> None:
        self.root = chroot

    def lease(self, lease: str) -> str:
        return f"{self.root}/{_OURS}/{_LEASES}/{lease}"

    def leaf(self, key: str) -> str:
        """The znode that holds the entry at `key`."""
        base, rest = self._base(key)
        match rest:
            case []:
                return f"{base}/:"
            case ["leader"]:
                return f"{base}/leader"
            case ["line", ticket] if is_ticket(ticket):
                return f"{base}/{ticket}"
            case ["line", _, *_]:
                raise ConfigError(f"{key!r}: a line holds its tickets and nothing else")
            case [only]:
                return f"{base}/:{_encode(only)}"
            case _:
                return f"{_inner(base, rest[:-1])}/{_encode(rest[-1])}"

    def line(self, line: str) -> str:
        """The znode that the tickets of `line` lie in."""
        base, rest = self._base(line)
        return base if rest == ["line"] else _inner(base, rest)

    async def walk(
        self, prefix: str, children: Callable[[str], Awaitable[Sequence[str]]]
    ) -> list[Leaf]:
        """Every leaf under `prefix`, the tickets of a line in order."""
        rooms, leaves = self._rooms(prefix), list[Leaf]()
        for room in rooms:
            inside, further = self._sort_out(room, await children(room.path or "/"))
            leaves += [leaf for leaf in inside if leaf.key != prefix]
            rooms += further
        return leaves

    def _base(self, key: str) -> tuple[str, list[str]]:
        """The znode of the election (or whatever else there is one of per name), and what is left
        of the key."""
        kind, _, rest = key.partition("/")
        name, *inside = rest.split("/") if rest else [""]
        top = self._top(kind)
        if not rest:
            return top, []
        if kind == _ELECTIONS and (path := _absolute(name)):
            return self.root + path, inside
        return f"{top}/{_encode(name)}", inside

    def _top(self, kind: str) -> str:
        if kind == _ELECTIONS:
            return f"{self.root}/{_ELECTIONS}"
        return f"{self.root}/{_OURS}/{_encode(kind, frozenset({_LEASES}))}"

    def _rooms(self, prefix: str) -> list[_Room]:
        if "/" not in prefix:
            rooms = [_Room(self._top(prefix), prefix, "kind")]
            if prefix == _ELECTIONS:
                rooms.append(_Room(self.root, prefix, "root"))
            return rooms
        base, rest = self._base(prefix)
        if not rest:
            return [_Room(base, prefix, "election")]
        if rest[0] == "line":
            return [_Room(base, prefix, "line")] if len(rest) == 1 else []
        return [_Room(_inner(base, rest), prefix, "inner")]

    def _sort_out(self, room: _Room, names: Sequence[str]) -> tuple[list[Leaf], list[_Room]]:
        """What the znodes in a room are: leaves, and further rooms."""

        def further(name: str, key: str, zone: _Zone, nested: bool = False) -> _Room:
            return _Room(f"{room.path}/{name}", key, zone, nested)

        if room.zone == "root":
            inside = [name for name in names if name not in _TOP]
            key = f"{room.key}/%2F"
            return [], [further(name, key + _decode(name), "election", True) for name in inside]
        if room.zone == "kind":
            inside = [name for name in names if name != ":"]
            return [], [further(name, f"{room.key}/{_decode(name)}", "election") for name in inside]
        line = f"{room.key}/line" if room.zone == "election" else room.key
        tickets = in_line(names)
        leaves = [Leaf(f"{line}/{name}", f"{room.path}/{name}") for name in tickets]
        rooms = []
        for name in sorted({*names} - {*tickets}) if room.zone != "line" else ():
            key = f"{room.key}/{_decode(name.strip(':'))}"
            if name == ":":
                leaves.append(Leaf(room.key, f"{room.path}/:"))
            elif name.endswith(":"):
                rooms.append(further(name, key, "inner"))
            elif room.zone == "inner" or name == "leader" or name.startswith(":"):
                leaves.append(Leaf(key, f"{room.path}/{name}"))
            elif room.nested:
                rooms.append(further(name, f"{room.key}%2F{_decode(name)}", "election", True))
        return leaves, rooms


def _inner(base: str, segments: list[str]) -> str:
    return "/".join([base, *(f"{_encode(segment)}:" for segment in segments)])


def _absolute(name: str) -> str | None:
    """The path that an election's name is, if it is one: "/app/leader_election"."""
    plain = unquote(name)
    first, *segments = plain.split("/")
    if first or not segments or not all(segments) or quote(plain, safe="") != name:
        return None
    names = [quote(segment, safe="") for segment in segments]
    ours = {"leader", *filter(is_ticket, names)}
    path = _encode(names[0], _TOP | ours)
    return "/" + "/".join([path, *(_encode(name, frozenset(ours)) for name in names[1:])])


def _encode(segment: str, reserved: frozenset[str] = frozenset()) -> str:
    name = "".join(each if _PLAIN.fullmatch(each) else _escape(each) for each in segment) or "="
    if name in reserved or name in (".", ".."):
        return _escape(name[0]) + name[1:]
    return name


def _escape(text: str) -> str:
    return "".join(f"={byte:02X}" for byte in text.encode())


def _decode(name: str) -> str:
    if name == "=":
        return ""
    # Others may have made a name that is none of ours; it must not end a walk.
    return _ESCAPED.sub(
        lambda found: bytes.fromhex(found[0].replace("=", "")).decode(errors="replace"), name
    )
