"""The history of all requests of a quorum's clients, recorded during a trial and checked
afterwards.

A `Recorder` appends a line to a file before every request and another after its answer, each with
the time since boot. The lines are not buffered, so they survive a kill of the process. Requests are
of two kinds:

- on the keyspace, a key is a register: it is read, or replaced if it still has the version that its
  client saw last (`put` with a version), or all keys under a prefix are read at once;
- on the user's state machine (`Ledger`), one register is swapped and read, and all its values are
  kept in order.

`flaws` returns what one register per key, one request at a time, could not have answered: values
that are lost, written twice or read too late; requests that were executed although they were
refused or reported as not executed. All values are different.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec

import doyen
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lease.clock import SystemClock

OK, NO, UNKNOWN, WRONG = "ok", "no", "unknown", "wrong"
"""Answered; not executed; outcome unknown; an error that must not occur."""

_now = SystemClock().now


def stamp() -> int:
    """Nanoseconds since boot, the same for all processes of this machine."""
    return int(_now() * 1e9)


class Ledger(doyen.StateMachine):
    """A register that is swapped and keeps all its values."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def apply(self, command: bytes) -> list[int | None]:
        """Returns the position of the new value, and the value before."""
        before = self.kept[-1] if self.kept else None
        self.kept.append(int(command))
        return [len(self.kept), before]

    def snapshot(self) -> Iterator[bytes]:
        return iter([msgspec.msgpack.encode(self.kept)])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.kept = msgspec.msgpack.decode(b"".join(pieces), type=list[int])


class Recorder:
    """Records the requests of one process."""

    def __init__(self, folder: Path) -> None:
        self._process = random.getrandbits(40)
        path = folder / f"{self._process:x}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._numbers = itertools.count(1)
        self._clients = itertools.count(1)

    def client(self) -> int:
        return self._process << 8 | next(self._clients)

    def value(self) -> int:
        """A value that is written only once."""
        return self._process << 22 | next(self._numbers)

    def begins(self, client: int, what: str, key: str = "", **more: Any) -> int:
        number = self._process << 22 | next(self._numbers)
        self._write({"begins": number, "client": client, "what": what, "key": key, **more})
        return number

    def ends(self, number: int, how: str, **more: Any) -> None:
        self._write({"ends": number, "how": how, **more})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps({"at": stamp(), **line}).encode() + b"\n")


@dataclass
class Request:
    """A request, and its answer if there is one."""

    number: int
    client: int
    what: str
    """`read`, `replace` or `list` on the keyspace; `swap` or `look` on the ledger."""
    key: str
    began: int
    value: int | None = None
    before: int | None = None
    """The value that is to be replaced."""
    how: str = UNKNOWN
    ended: float = inf
    result: Any = None
    place: int | None = None


@dataclass
class History:
    """All requests in order, and the content of every node's ledger at the end."""

    requests: list[Request]
    ledgers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, ledgers: Mapping[str, Sequence[int]] | None = None) -> History:
        found: dict[int, Request] = {}
        for path in sorted(folder.glob("*.history")):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                at = line.pop("at")
                if "begins" in line:
                    number = line.pop("begins")
                    found[number] = Request(number, began=at, **line)
                else:
                    request = found[line["ends"]]
                    request.how, request.ended = line["how"], at
                    request.result, request.place = line.get("result"), line.get("place")
        return cls(sorted(found.values(), key=lambda each: each.began), ledgers or {})

    def count(self, *whats: str) -> int:
        return sum(each.how == OK for each in self.requests if each.what in whats)


def flaws(history: History) -> list[str]:
    """The flaws of a history; none if it is sound."""
    wrong = [f"{each}" for each in history.requests if each.how == WRONG]
    return [*wrong, *_of_keyspace(history), *_of_ledger(history)]


def _of_keyspace(history: History) -> Iterator[str]:
    replaced = [each for each in history.requests if each.what == "replace"]
    keys = {key: number for number, key in enumerate(sorted({each.key for each in replaced}))}
    reads = [*_reads(history, keys)]
    # A write whose value was never read may be left out, whether or not it was executed: the next
    # request would have seen its value.
    seen = {each.result for each in (*replaced, *reads) if each.how == OK}
    successor: dict[tuple[str, int | None], Request] = {}
    operations = [_operation(each, keys) for each in reads]
    for each in replaced:
        if each.how == OK or (each.how == UNKNOWN and each.value in seen):
            operations.append(_operation(each, keys))
            other = successor.setdefault((each.key, each.before), each)
            if other is not each:
                yield f"two requests replaced the same value: {other} and {each}"
    for each in replaced:
        if each.how == NO and each.result == "refused":
            follows = successor.get((each.key, each.before))
            if follows is None or follows.began > each.ended:
                yield f"refused without a reason: {each}"
    unexplained = linearizable(operations)
    if unexplained is not None:
        yield f"no order explains k{unexplained[0].key}: {_tail(unexplained)}"


def _reads(history: History, keys: Mapping[str, int]) -> Iterator[Request]:
    for each in history.requests:
        if each.how != OK:
            continue
        if each.what == "read":
            yield each
        elif each.what == "list":
            for key in keys:
                if key.startswith(each.key + "/"):
                    result = each.result.get(key)
                    yield replace(each, what="read", key=key, result=result)


def _operation(request: Request, keys: Mapping[str, int]) -> Operation:
    key = keys.get(request.key, -1)
    operation = Operation(request.client, request.number, key, request.value, request.began)
    if request.how == OK:
        operation.ended, operation.result = request.ended, request.result
    return operation


def _of_ledger(history: History) -> Iterator[str]:
    longest = max(history.ledgers.values(), key=len, default=[])
    for name, kept in history.ledgers.items():
        if list(kept) != list(longest[: len(kept)]):
            pairs = zip(kept, longest, strict=False)
            at = next(at for at, (one, other) in enumerate(pairs) if one != other)
            yield f"the ledger of {name} differs from that of other nodes at {at + 1}"
    places = {value: place for place, value in enumerate(longest, 1)}
    if len(places) < len(longest):
        yield f"{len(longest) - len(places)} swaps were executed more than once"
    operations = []
    for each in history.requests:
        if each.what == "swap":
            place = places.get(each.value or 0)
            if each.how == OK and place != each.place:
                yield f"acknowledged at {each.place}, but is at {place}: {each}"
            elif each.how == NO and place is not None:
                yield f"reported as not executed, but is at {place}: {each}"
        elif each.what == "look" and each.how == OK:
            place = each.place
        else:
            continue
        if place is not None:
            operation = _operation(each, {})
            operation.position = place
            operations.append(operation)
    unexplained = witnessed(operations)
    if unexplained is not None:
        yield f"the ledger's order does not explain {unexplained!r}"


def _tail(operations: Sequence[Operation]) -> str:
    """The last operations. The checker does not say which one cannot be explained."""
    first = min(each.began for each in operations)
    shown = sorted(operations, key=lambda each: each.began)[-40:]
    return "".join(
        f"\n  {(each.began - first) / 1e9:.4f} to {(each.ended - first) / 1e9:.4f} {each!r}"
        for each in shown
    )
