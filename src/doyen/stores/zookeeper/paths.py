"""The znodes of the port's keys. Pure: names in, names out.

An election has one persistent znode, with the children that operators know from ZooKeeper's
recipes:

    /chroot/app/leader_election                      the election "/app/leader_election"
    /chroot/app/leader_election/guid_0000000001      a ticket; guid_5_0000000002 has the rank 5
    /chroot/app/leader_election/leader               the leader record
    /chroot/app/leader_election/leader:/order        what is below the key `…/leader`
    /chroot/elections/billing/…                      the election "billing"
    /chroot/doyen/locks/migration/…                  every other kind
    /chroot/doyen/leases/0x1000…                     the znode to which renewals of a lease write

An ephemeral znode has no children, so a key and the parent of the keys below it are two znodes:
`leader` and `leader:`. The names of keys that an election does not usually have begin with a colon,
so that another election may be nested in it: "/app" beside "/app/leader_election".

No two keys share a znode. The segments of a key are percent-encoded. Other characters that have a
meaning in paths, and the first character of a reserved name, are written as `=` and two hexadecimal
digits: the znode of the election "/app/leader" is `/chroot/app/=6Ceader`.

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
    """The prefix of a ticket's name. ZooKeeper appends ten digits."""
    return f"guid_{rank}_" if rank else "guid_"


def in_line(names: Iterable[str]) -> list[str]:
    """The tickets among the names, in the order of the line.

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
class _Directory:
    """A znode with entries as children, and the key above them."""

    path: str
    key: str
    zone: _Zone
    nested: bool = False
    """Includes elections whose names begin with the name of this one and a slash."""


class Layout:
    """The tree below a chroot, which is empty or a path without a slash at its end."""

    def __init__(self, chroot: str) -> None:
        self.root = chroot

    def is_ticket(self, name: str) -> bool:
        """Whether the znode of this name is a ticket, which is not written again."""
        return is_ticket(name)

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
                raise ConfigError(f"{key!r}: a line holds only its tickets")
            case [only]:
                return f"{base}/:{_encode(only)}"
            case _:
                return f"{_inner(base, rest[:-1])}/{_encode(rest[-1])}"

    def line(self, line: str) -> str:
        """The parent znode of the tickets of `line`."""
        base, rest = self._base(line)
        return base if rest == ["line"] else _inner(base, rest)

    async def walk(
        self, prefix: str, children: Callable[[str], Awaitable[Sequence[str]]]
    ) -> list[Leaf]:
        """Every leaf below `prefix`, the tickets of a line in order."""
        directories, leaves = self._directories(prefix), list[Leaf]()
        for directory in directories:
            found, further = self._classify(directory, await children(directory.path or "/"))
            leaves += [leaf for leaf in found if leaf.key != prefix]
            directories += further
        return leaves

    def _base(self, key: str) -> tuple[str, list[str]]:
        """The znode of the election, or of another named object, and the rest of the key."""
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

    def _directories(self, prefix: str) -> list[_Directory]:
        if "/" not in prefix:
            directories = [_Directory(self._top(prefix), prefix, "kind")]
            if prefix == _ELECTIONS:
                directories.append(_Directory(self.root, prefix, "root"))
            return directories
        base, rest = self._base(prefix)
        if not rest:
            return [_Directory(base, prefix, "election")]
        if rest[0] == "line":
            return [_Directory(base, prefix, "line")] if len(rest) == 1 else []
        return [_Directory(_inner(base, rest), prefix, "inner")]

    def _classify(
        self, directory: _Directory, names: Sequence[str]
    ) -> tuple[list[Leaf], list[_Directory]]:
        """The leaves and the further directories among the children of a directory."""

        def further(name: str, key: str, zone: _Zone, nested: bool = False) -> _Directory:
            return _Directory(f"{directory.path}/{name}", key, zone, nested)

        if directory.zone == "root":
            inside = [name for name in names if name not in _TOP]
            key = f"{directory.key}/%2F"
            return [], [further(name, key + _decode(name), "election", True) for name in inside]
        if directory.zone == "kind":
            inside = [name for name in names if name != ":"]
            return [], [
                further(name, f"{directory.key}/{_decode(name)}", "election") for name in inside
            ]
        line = f"{directory.key}/line" if directory.zone == "election" else directory.key
        tickets = in_line(names)
        leaves = [Leaf(f"{line}/{name}", f"{directory.path}/{name}") for name in tickets]
        directories = []
        for name in sorted({*names} - {*tickets}) if directory.zone != "line" else ():
            key = f"{directory.key}/{_decode(name.strip(':'))}"
            if name == ":":
                leaves.append(Leaf(directory.key, f"{directory.path}/:"))
            elif name.endswith(":"):
                directories.append(further(name, key, "inner"))
            elif directory.zone == "inner" or name == "leader" or name.startswith(":"):
                leaves.append(Leaf(key, f"{directory.path}/{name}"))
            elif directory.nested:
                directories.append(
                    further(name, f"{directory.key}%2F{_decode(name)}", "election", True)
                )
        return leaves, directories


def _inner(base: str, segments: list[str]) -> str:
    return "/".join([base, *(f"{_encode(segment)}:" for segment in segments)])


def _absolute(name: str) -> str | None:
    """The path of an election whose name is a path, such as "/app/leader_election"."""
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
    # Another program may have created a name that doyen cannot have. It must not end a walk.
    return _ESCAPED.sub(
        lambda found: bytes.fromhex(found[0].replace("=", "")).decode(errors="replace"), name
    )
