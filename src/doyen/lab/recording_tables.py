"""The tables of a recording: lanes and roles, logs, messages and spans. `recorder` says what their
rows hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from doyen.lab import phrases
from doyen.lab.observer import Fate
from doyen.quorum.consensus.core import Message, Received

MOST_MESSAGES = 60_000
"""How many messages a recording keeps."""
TAIL = 32
"""How many entries of a log are recorded one by one when a server starts."""
STORE = "the store"

DOWN, LOOKING, FOLLOWING, LEADING = range(4)

ARRIVED = "arrived"
UNRECEIVED = "unreceived"
"""It was under way at the end, or its receiver was down."""
FATES = (ARRIVED, *(str(fate) for fate in Fate), UNRECEIVED)


class Instants:
    """The time of a run, in whole microseconds. It does not go back."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.seconds = seconds
        self.last = 0
        """When something was last recorded."""

    def now(self) -> int:
        return self.include(self.seconds())

    def include(self, seconds: float) -> int:
        self.last = max(self.last, microseconds(seconds))
        return self.last


class Strings:
    """Texts that rows refer to by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class LogRows:
    """The log of one server over time."""

    def __init__(self, lane: int, rows: list[list[int]], bases: list[list[int]]) -> None:
        self._lane = lane
        self._rows = rows
        self._bases = bases
        self._now: dict[int, list[int]] = {}
        """By index: the row of the entry that is in the log."""
        self.last = 0

    def has(self, index: int, generation: int) -> bool:
        row = self._now.get(index)
        return row is not None and row[2] == generation

    def write(self, at: int, first: int, generations: Sequence[int], *, keep: bool) -> None:
        last = first + len(generations) - 1
        if not keep:
            self._cut(at, last)
        for index, generation in enumerate(generations, first):
            self._set(at, index, generation)
        self.last = max(self.last if keep else 0, last)

    def commit(self, at: int, first: int, generations: Sequence[int]) -> None:
        for index, generation in enumerate(generations, first):
            row = self._set(at, index, generation)
            if row[4] < 0:
                row[4] = at

    def start(self, at: int, base: int, generations: Sequence[int], commit: int) -> None:
        """The log is read from disk, or replaced by a snapshot."""
        self.end(at)
        self.last = base + len(generations)
        above = max(base, self.last - TAIL)
        if above:
            self._bases.append([self._lane, at, above])
        for index in range(above + 1, self.last + 1):
            row = self._set(at, index, generations[index - base - 1])
            if index <= commit:
                row[4] = at

    def end(self, at: int) -> None:
        """The server is down."""
        for row in self._now.values():
            row[5] = at
        self._now.clear()
        if self.last > 0:
            self._bases.append([self._lane, at, 0])
        self.last = 0

    def _set(self, at: int, index: int, generation: int) -> list[int]:
        row = self._now.get(index)
        if row is not None:
            if row[2] == generation:
                return row
            row[5] = at
        self._now[index] = row = [self._lane, index, generation, at, -1, -1]
        self._rows.append(row)
        self.last = max(self.last, index)
        return row

    def _cut(self, at: int, last: int) -> None:
        for index in range(self.last, last, -1):
            row = self._now.pop(index, None)
            if row is not None:
                row[5] = at


class LogTable:
    """The logs of all servers over time."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.bases: list[list[int]] = []
        self.of: dict[str, LogRows] = {}

    def add(self, name: str, lane: int) -> LogRows:
        """The log of a server, which may have one already."""
        log = self.of.get(name)
        if log is None:
            log = self.of[name] = LogRows(lane, self.rows, self.bases)
        return log

    def holders(self, index: int, generation: int) -> list[str]:
        return [name for name, log in self.of.items() if log.has(index, generation)]


class LaneTable:
    """The lanes in their order, and the role of each over time."""

    def __init__(self, instants: Instants) -> None:
        self._instants = instants
        self._role_of: dict[int, tuple[int, str]] = {}
        self.numbers: dict[str, int] = {}
        self.rows: list[list[int]] = []
        self.labels = Strings()

    def number(self, name: str) -> int:
        lane = self.numbers.get(name)
        if lane is None:
            lane = self.numbers[name] = len(self.numbers)
            self.set_role(name, DOWN, "")
        return lane

    def is_down(self, name: str) -> bool:
        return self._role_of[self.number(name)][0] == DOWN

    def set_role(self, name: str, role: int, label: str, at: int | None = None) -> None:
        lane = self.number(name)
        if self._role_of.get(lane) != (role, label):
            self._role_of[lane] = (role, label)
            since = self._instants.now() if at is None else at
            self.rows.append([lane, since, role, self.labels.number(label)])


class MessageTable:
    """Messages, and which of those that arrive is which of those that were sent."""

    def __init__(self, instants: Instants, lanes: LaneTable, protocol: str) -> None:
        self._instants = instants
        self._lanes = lanes
        self._protocol = protocol
        self._rows: deque[list[Any]] = deque(maxlen=MOST_MESSAGES)
        self._count = 0
        self._under_way: dict[int, tuple[Received, list[Any], int]] = {}
        """By the identity of the event: the event, its row and its number."""
        self._causes: dict[tuple[int, str], tuple[Message, int, int]] = {}
        """By message and receiver: the message, the number of what it answers, and the reason."""
        self._unmatched: dict[tuple[str, str], deque[tuple[Message, list[Any], int]]] = {}
        """Messages of whole nodes by sender and receiver, until they arrive."""
        self._snapshots: dict[tuple[str, str], list[Any]] = {}
        self._acknowledged: dict[tuple[str, str], int] = {}
        self.kinds: dict[phrases.Phrase, int] = {}
        self.reasons = Strings()

    # Messages of cores. Those of the simulated network are first prepared and then sent.

    def prepare(self, target: str, message: Message, cause: int, why: int) -> None:
        self._causes[id(message), target] = (message, cause, why)

    def send(self, source: str, target: str, event: Received, result: float | Fate) -> None:
        message, cause, why = self._causes.pop((id(event.message), target), (None, -1, -1))
        row, number = self._add(source, target, event.message, cause)
        row[7] = why if message is event.message else -1
        if isinstance(result, Fate):
            row[5] = FATES.index(result)
        else:
            row[1] = microseconds(result)
            self._under_way[id(event)] = (event, row, number)

    def send_unseen(self, source: str, target: str, message: Message, cause: int, why: int) -> None:
        """A whole node sends a message, and its way through the network is not reported."""
        row, number = self._add(source, target, message, cause)
        row[7] = why
        waiting = self._unmatched.setdefault((source, target), deque(maxlen=200))
        waiting.append((message, row, number))

    def receive(self, target: str, event: Received) -> int:
        """A message was handled. Returns its number, or -1 if it was not seen."""
        found = self._under_way.pop(id(event), None)
        if found is not None:
            _, row, number = found
            row[5] = FATES.index(ARRIVED)
            return number
        waiting = self._unmatched.get((event.peer, target))
        for place, (message, row, number) in enumerate(waiting or ()):
            if message == event.message:
                self.arrive(row)
                assert waiting is not None
                del waiting[place]
                return number
        return -1

    def send_snapshot(self, source: str, target: str) -> None:
        kind = phrases.Phrase("snapshot", phrases.ENTRIES, "", "Here is my latest snapshot.")
        self._snapshots[source, target], _ = self.append(source, target, kind, -1, ())

    def receive_snapshot(self, source: str, target: str) -> None:
        row = self._snapshots.pop((source, target), None)
        if row is not None:
            self.arrive(row)

    def _add(self, source: str, target: str, message: Message, cause: int) -> tuple[list[Any], int]:
        kind = phrases.phrase(self._protocol, message)
        if kind.category == phrases.ENTRIES and kind.says.startswith("I have everything"):
            # An acknowledgement of nothing new answers a heartbeat.
            last = int(getattr(message, "last", getattr(message, "index", 0)))
            if self._acknowledged.get((source, target)) == last:
                kind = kind._replace(category=phrases.BEATS)
            self._acknowledged[source, target] = last
        return self.append(source, target, kind, cause, phrases.values(kind.says, message))

    # Rows.

    def append(
        self, source: str, target: str, kind: phrases.Phrase, cause: int, values: Sequence[Any]
    ) -> tuple[list[Any], int]:
        """Add a message that is under way. Returns its row and its number."""
        number = self._count
        self._count += 1
        row = [
            *(self._instants.now(), -1, self._lanes.number(source), self._lanes.number(target)),
            *(self.kinds.setdefault(kind, len(self.kinds)), FATES.index(UNRECEIVED), cause, -1),
            *values,
        ]
        self._rows.append(row)
        return row, number

    def arrive(self, row: list[Any]) -> None:
        row[1], row[5] = self._instants.now(), FATES.index(ARRIVED)

    def row(self, number: int) -> list[Any] | None:
        place = number - (self._count - len(self._rows))
        return self._rows[place] if 0 <= place < len(self._rows) else None

    def kind(self, row: list[Any]) -> phrases.Phrase:
        number: int = row[4]
        return list(self.kinds)[number]

    def finish(self) -> tuple[int, list[list[Any]]]:
        """The number of the first row that was kept, and the rows."""
        first = self._count - len(self._rows)
        for row in self._rows:
            row[6] = max(-1, row[6] - first)
        return first, list(self._rows)


class SpanTable:
    """What lasts: pauses, clocks that run at another rate, and the state of the network."""

    def __init__(self, instants: Instants, lanes: LaneTable) -> None:
        self._instants = instants
        self._lanes = lanes
        self._rows: list[list[Any]] = []
        self._open: dict[tuple[str, str], tuple[int, str]] = {}
        self._links: dict[tuple[str, str], int] = {}
        """The links that are cut, and since when."""
        self._cuts: list[tuple[str, str, int, int]] = []

    def begin(self, kind: str, name: str, label: str) -> None:
        self._open.setdefault((kind, name), (self._instants.now(), label))

    def close(self, kind: str, name: str, end: int | None = None) -> None:
        began = self._open.pop((kind, name), None)
        if began is not None:
            lane = -1 if kind == "weather" else self._lanes.number(name)
            self._rows.append([kind, lane, began[0], end or self._instants.now(), began[1]])

    def set_weather(self, what: str, text: str) -> None:
        """Something holds for the network, or no longer if there is no text."""
        began = self._open.get(("weather", what))
        if began is not None and began[1] != text:
            self.close("weather", what)
            began = None
        if text and began is None:
            self.begin("weather", what, text)

    def set_cut(self, source: str, target: str, cut: bool) -> None:
        began = self._links.pop((source, target), None)
        if began is not None and not cut:
            self._cuts.append((source, target, began, self._instants.now()))
        elif cut:
            self._links[source, target] = self._instants.now() if began is None else began

    def finish(self, end: int) -> list[list[Any]]:
        for kind, name in list(self._open):
            self.close(kind, name, end)
        self._cuts += [(*link, began, end) for link, began in self._links.items()]
        return [*self._rows, *self._cut_spans()]

    def _cut_spans(self) -> list[list[Any]]:
        """For each lane, from when to when it cannot reach some of the others."""
        spans: list[list[Any]] = []
        for name, lane in self._lanes.numbers.items():
            cuts = [cut for cut in self._cuts if name in cut[:2] and cut[2] < cut[3]]
            times = sorted({time for cut in cuts for time in cut[2:]})
            for begin, end in pairwise(times):
                now = {cut[:2] for cut in cuts if cut[2] <= begin and cut[3] >= end}
                label, share = self._cut_label(name, now)
                if not label:
                    continue
                last = spans[-1] if spans else None
                if last is not None and last[1] == lane and last[3:5] == [begin, label]:
                    last[3] = end
                else:
                    spans.append(["cut", lane, begin, end, label, share])
        return spans

    def _cut_label(self, name: str, cuts: set[tuple[str, str]]) -> tuple[str, float]:
        others = [other for other in self._lanes.numbers if other != name and other != STORE]
        silent = [other for other in others if (name, other) in cuts]
        deaf = [other for other in others if (other, name) in cuts]
        if not silent and not deaf:
            return "", 0.0
        if silent == deaf:
            whom = "everybody" if len(silent) == len(others) else listed(silent)
            return f"cut off from {whom}", round(len(silent) / len(others), 2)
        parts = [f"cannot send to {listed(silent)}"] if silent else []
        parts += [f"does not hear {listed(deaf)}"] if deaf else []
        return "; ".join(parts), round(max(len(silent), len(deaf)) / len(others), 2)


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
