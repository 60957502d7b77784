"""Records a run so that it can be drawn: lanes, roles, logs, messages, faults and the story.

A `Recorder` observes one world (see `observer`) and collects rows of numbers, which `finish`
returns as an object for JSON. Its size is bounded: of the messages, the last `MOST_MESSAGES` are
kept. Times are whole microseconds of virtual time. `pages` draws the result. The rows:

    roles      lane, from, role, label
    logs       lane, index, generation, from, committed at, until; -1 where it has not happened
    bases      lane, from, index: entries up to this index are there and have no rows
    messages   sent, arrives, from, to, kind, fate, answers, reason, and the values of the sentence
    spans      kind, lane, from, to, label
    marks      at, lane, label
    story      at, icon, text
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from doyen.lab import phrases
from doyen.lab.narration import Narrator, sentence
from doyen.lab.observer import Fate, WorldObserver
from doyen.lab.outcome import Violation
from doyen.lab.protocols import Protocol
from doyen.quorum.consensus.core import (
    Committed,
    Core,
    CoreEvent,
    Effect,
    Install,
    Message,
    Persist,
    Received,
    Recovered,
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    SnapshotReceived,
)

if TYPE_CHECKING:
    from doyen.lab.network import SimulatedLink

MOST_MESSAGES = 60_000
"""How many messages a recording keeps."""
TAIL = 32
"""How many entries of a log are recorded one by one when a server starts."""
MOST_LANES = 24
STORE = "the store"

DOWN, LOOKING, FOLLOWING, LEADING = range(4)
_ROLES = {Role.LOOKING: LOOKING, Role.FOLLOWING: FOLLOWING, Role.LEADING: LEADING}

ARRIVED = "arrived"
UNRECEIVED = "unreceived"
"""It was under way at the end, or its receiver was down."""
FATES = (ARRIVED, *(str(fate) for fate in Fate), UNRECEIVED)

_STARTS = [
    (start, icon)
    for icon, starts in (
        ("leads", ("leads", "is the master", "is elected", "is the controller")),
        ("follows", ("follow",)),
        ("asks", ("asks for",)),
        ("yes", ("votes for", "gets the acknowledgement")),
        ("no", ("refuses", "ignores", "is refused", "has its", "gets ", "does not answer")),
        ("fault", ("is killed", "is paused", "cannot", "lose", "has a ", "receive ", "repeats")),
        ("fault", ("reorders", "is the only", "ends its own", "the network is cut", "drops")),
        ("healed", ("can ", "is back", "resumes", "all faults", "is no longer", "starts")),
        ("healed", ("the network is no longer",)),
        ("entry", ("entry ", "entries ")),
        ("order", ("is asked",)),
    )
    for start in starts
]


def icon_of(predicate: str) -> str:
    """The icon of a line of the story, by the way it begins."""
    return next((icon for start, icon in _STARTS if predicate.startswith(start)), "other")


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


class Recorder(WorldObserver):
    """Records one world."""

    def __init__(
        self,
        now: Callable[[], float],
        names: Sequence[str],
        *,
        protocol: Protocol | None = None,
        others: Sequence[str] = (),
        generation: str = "generation",
        whole_nodes: bool = False,
    ) -> None:
        """`names` are the servers, `others` the lanes below them. `generation` is the protocol's
        own word. Whole nodes do not report the messages that they send, but what their cores send
        and receive."""
        self._clock = now
        self._last = 0
        """When something was last recorded."""
        self._protocol = protocol
        self._generation = generation
        self._whole_nodes = whole_nodes
        self._lanes: dict[str, int] = {}
        self._servers = list(names)
        self._roles: list[list[int]] = []
        self._role_of: dict[int, tuple[int, str]] = {}
        self._rows: list[list[int]] = []
        self._bases: list[list[int]] = []
        self._logs: dict[str, LogRows] = {}
        self._views: dict[str, phrases.VoterView] = {}
        self._labels = Strings()
        self._reasons = Strings()
        self._kinds: dict[phrases.Phrase, int] = {}
        self._messages: deque[list[Any]] = deque(maxlen=MOST_MESSAGES)
        self._sent = 0
        self._under_way: dict[int, tuple[Received, list[Any], int]] = {}
        """By the identity of the event: the event, its row and its number."""
        self._causes: dict[tuple[int, str], tuple[Message, int, int]] = {}
        """By message and receiver: the message, the number of what it answers, and the reason."""
        self._unmatched: dict[tuple[str, str], deque[tuple[Message, list[Any], int]]] = {}
        """Messages of whole nodes by sender and receiver, until they arrive."""
        self._snapshots: dict[tuple[str, str], list[Any]] = {}
        self._acknowledged: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[Any, ...], tuple[int, str]] = {}
        self._spans: list[list[Any]] = []
        self._links: dict[tuple[str, str], int] = {}
        self._cuts: list[tuple[str, str, int, int]] = []
        self._marks: list[list[Any]] = []
        self._narrator = Narrator()
        self._committed = 0
        self._terms: dict[str, dict[str, int]] = {}
        """By process: the tokens of the elections that it leads."""
        self._elections: dict[str, None] = {}
        self._answers: dict[int, list[Any]] = {}
        """Answers and notifications of the store that are under way."""
        self.transcript: list[tuple[float, str, str]] | None = None
        """Lines that replace the narration, if given: time, icon and text."""
        for name in (*names, *others):
            self._lane(name)

    @property
    def _now(self) -> int:
        self._last = max(self._last, _micro(self._clock()))
        return self._last

    @property
    def crowded(self) -> bool:
        """Whether there are more lanes than a reader could follow. Requests to a store are then no
        longer recorded."""
        return len(self._lanes) > MOST_LANES

    def _lane(self, name: str) -> int:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = len(self._lanes)
            self._set_role(lane, DOWN, "")
        return lane

    # Servers.

    def _ignored_process(self, name: str) -> bool:
        """Whether a process has no lane: a client of whole nodes."""
        return self._whole_nodes and name not in self._lanes

    def started(self, name: str, core: Core | None, recovered: Recovered | None) -> None:
        if core is None and self._ignored_process(name):
            return
        lane = self._lane(name)
        if core is None:
            self._set_role(lane, FOLLOWING, "serves" if name == STORE else "waits")
            return
        if name not in self._servers:
            self._servers.append(name)
        log = self._logs.get(name)
        if log is None:
            log = self._logs[name] = LogRows(lane, self._rows, self._bases)
        if recovered is not None:
            base = recovered.snapshot.index if recovered.snapshot is not None else 0
            generations = [entry.generation for entry in recovered.entries]
            log.start(self._now, base, generations, core.commit)
        self._views[name] = phrases.voter_view(core)
        self._role_changed(lane, core.role, core.generation, core.leader)

    def stopped(self, name: str) -> None:
        if self._ignored_process(name):
            return
        self._set_role(self._lane(name), DOWN, "is down")
        self._terms.pop(name, None)
        self._close(("paused", name))
        if name in self._logs:
            self._logs[name].end(self._now)

    def paused(self, name: str, paused: bool) -> None:
        if self._ignored_process(name):
            return
        if paused:
            self._begin(("paused", name), "paused")
        else:
            self._close(("paused", name))

    def clock_adjusted(self, name: str, rate: float | None, jump_s: float) -> None:
        if rate is not None:
            self._close(("clock", name))
            if rate != 1.0:
                self._begin(("clock", name), f"clock runs at {rate:g} times the true rate")
        if jump_s:
            self._marks.append([self._now, self._lane(name), f"clock jumps {jump_s:g} s ahead"])

    def term_changed(
        self,
        name: str,
        token: int | None,
        *,
        election: str = "",
        ended_at: float | None = None,
    ) -> None:
        if self._ignored_process(name) or self._role_of[self._lane(name)][0] == DOWN:
            return
        terms = self._terms.setdefault(name, {})
        self._elections[election] = None
        if token is not None:
            terms[election] = token
        else:
            terms.pop(election, None)
        if len(self._elections) > 1 and terms:
            label = f"leads {_listed([each.strip('/') for each in terms])}"
        else:
            label = "".join(f"leads, token {held}" for held in terms.values()) or "waits"
        at = self._now if ended_at is None else min(self._now, _micro(ended_at))
        self._set_role(self._lane(name), LEADING if terms else FOLLOWING, label, at)

    def _set_role(self, lane: int, role: int, label: str, at: int | None = None) -> None:
        if self._role_of.get(lane) != (role, label):
            self._role_of[lane] = (role, label)
            since = self._now if at is None else at
            self._roles.append([lane, since, role, self._labels.number(label)])

    def _role_changed(self, lane: int, role: Role, generation: int, leader: str | None) -> None:
        word = self._generation
        match role:
            case Role.LEADING:
                label = f"leads, {word} {generation}"
            case Role.FOLLOWING:
                label = f"follows {leader}"
            case _:
                label = f"looks, {word} {generation}"
        self._set_role(lane, _ROLES[role], label)

    # Steps of cores.

    def stepped(self, name: str, core: Core, event: CoreEvent, effects: Sequence[Effect]) -> None:
        before = self._views.get(name)
        cause = -1
        if type(event) is Received:
            cause = self._received(name, event)
        elif type(event) is SnapshotReceived:
            row = self._snapshots.pop((event.peer, name), None)
            if row is not None:
                self._arrive(row)
        answered = False
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                assert isinstance(effect, Send)
                answered |= self._prepare(name, before, event, effect, cause)
            elif kind is SendSnapshot:
                assert isinstance(effect, SendSnapshot)
                self._send_snapshot(name, effect.peer)
            else:
                self._changed(name, effect)
        if (
            before is not None
            and not answered
            and type(event) is Received
            and phrases.asks_for_vote(event.message)
        ):
            self._ignored(before, event, cause)
        if self._protocol is not None:
            self._narrator.add_votes(self._clock(), name, self._protocol, effects)
        self._views[name] = phrases.voter_view(core)

    def _changed(self, name: str, effect: Effect) -> None:
        """A server writes, commits or changes its role."""
        log = self._logs.get(name)
        match effect:
            case RoleChanged(role, generation, leader):
                self._role_changed(self._lane(name), role, generation, leader)
            case Persist(first=first, entries=entries, keep=keep) if first and log is not None:
                generations = [entry.generation for entry in entries]
                log.write(self._now, first, generations, keep=keep)
            case Committed(first, entries) if log is not None:
                generations = [entry.generation for entry in entries]
                log.commit(self._now, first, generations)
                self._tell_commit(first, generations)
            case Install(snapshot) if log is not None:
                log.start(self._now, snapshot.index, (), snapshot.index)

    def _tell_commit(self, first: int, generations: Sequence[int]) -> None:
        last = first + len(generations) - 1
        if last <= self._committed:
            return
        first, self._committed = self._committed + 1, last
        holders = [name for name, log in self._logs.items() if log.has(last, generations[-1])]
        have = f"{_listed(holders)} {'have' if len(holders) > 1 else 'has'} it"
        lines = self._narrator.lines
        if lines and lines[-1][2].startswith(("entry ", "entries ")) and not lines[-1][1]:
            at, _, text = lines.pop()
            first = int(text.split()[1])
        else:
            at = self._clock()
        what = phrases.entries_text(range(first, last + 1))
        verb, have = ("is", f": {have}") if first == last else ("are", "")
        lines.append((at, "", f"{what} {verb} committed{have}"))

    # Messages.

    def _received(self, name: str, event: Received) -> int:
        """A message was handled. Returns its number."""
        found = self._under_way.pop(id(event), None)
        if found is not None:
            _, row, number = found
            row[5] = FATES.index(ARRIVED)
            return number
        waiting = self._unmatched.get((event.peer, name))
        for place, (message, row, number) in enumerate(waiting or ()):
            if message == event.message:
                self._arrive(row)
                assert waiting is not None
                del waiting[place]
                return number
        return -1

    def _prepare(
        self,
        name: str,
        before: phrases.VoterView | None,
        event: CoreEvent,
        effect: Send,
        cause: int,
    ) -> bool:
        """Note what a message answers, and why. True if it answers the event."""
        answers = type(event) is Received and event.peer == effect.peer
        why = -1
        message = effect.message
        if phrases.asks_for_vote(message) and type(message).__name__ != "PreVote":
            label = f"stands, {self._generation} {message.generation}"
            self._set_role(self._lane(name), LOOKING, label)
        if answers and before is not None:
            assert isinstance(event, Received)
            if phrases.asks_for_vote(event.message) and hasattr(effect.message, "granted"):
                text = phrases.reason(before, event.peer, event.message, effect.message)
                why = self._reasons.number(text) if text else -1
                self._tell_vote(name, effect)
        if not self._whole_nodes:
            self._causes[id(effect.message), effect.peer] = (
                effect.message,
                cause if answers else -1,
                why,
            )
        else:
            row, number = self._add(name, effect.peer, effect.message, cause if answers else -1)
            row[7] = why
            waiting = self._unmatched.setdefault((name, effect.peer), deque(maxlen=200))
            waiting.append((effect.message, row, number))
        return answers

    def _tell_vote(self, name: str, effect: Send) -> None:
        if type(effect.message).__name__ == "PreVoteReply":
            return
        if getattr(effect.message, "granted", False):
            self._set_role(self._lane(name), LOOKING, f"voted for {effect.peer}")
        else:
            text = f"refuses {effect.peer} its vote"
            if (lines := self._narrator.lines) and lines[-1][1:] == (name, text):
                return
            self._narrator.add(self._clock(), name, text)

    def _ignored(self, before: phrases.VoterView, event: Received, number: int) -> None:
        text = phrases.reason(before, event.peer, event.message, None)
        row = self._row(number)
        if text and row is not None:
            row[7] = self._reasons.number(f"{before.name} does not answer: {text}")

    def _row(self, number: int) -> list[Any] | None:
        place = number - (self._sent - len(self._messages))
        return self._messages[place] if 0 <= place < len(self._messages) else None

    def sent(self, link: SimulatedLink, event: Received, result: float | Fate) -> None:
        source, target = link.source.id, link.target.id
        message, cause, why = self._causes.pop((id(event.message), target), (None, -1, -1))
        row, number = self._add(source, target, event.message, cause)
        row[7] = why if message is event.message else -1
        if isinstance(result, Fate):
            row[5] = FATES.index(result)
        else:
            row[1] = _micro(result)
            self._under_way[id(event)] = (event, row, number)

    def _add(self, source: str, target: str, message: Message, cause: int) -> tuple[list[Any], int]:
        protocol = self._protocol.name if self._protocol is not None else ""
        kind = phrases.phrase(protocol, message)
        if kind.category == phrases.ENTRIES and kind.says.startswith("I have everything"):
            # An acknowledgement of nothing new answers a heartbeat.
            last = int(getattr(message, "last", getattr(message, "index", 0)))
            if self._acknowledged.get((source, target)) == last:
                kind = kind._replace(category=phrases.BEATS)
            self._acknowledged[source, target] = last
        return self._append(source, target, kind, cause, phrases.values(kind.says, message))

    def _append(
        self, source: str, target: str, kind: phrases.Phrase, cause: int, values: Sequence[Any]
    ) -> tuple[list[Any], int]:
        number = self._sent
        self._sent += 1
        row = [
            *(self._now, -1, self._lane(source), self._lane(target)),
            *(self._kinds.setdefault(kind, len(self._kinds)), FATES.index(UNRECEIVED), cause, -1),
            *values,
        ]
        self._messages.append(row)
        return row, number

    def _send_snapshot(self, source: str, target: str) -> None:
        kind = phrases.Phrase("snapshot", phrases.ENTRIES, "", "Here is my latest snapshot.")
        self._snapshots[source, target], _ = self._append(source, target, kind, -1, ())

    # The network.

    def link_changed(self, source: str, target: str, cut: bool, extra_s: float) -> None:
        if source not in self._lanes or target not in self._lanes:
            return
        began = self._links.pop((source, target), None)
        if began is not None and not cut:
            self._cuts.append((source, target, began, self._now))
        elif cut:
            self._links[source, target] = self._now if began is None else began
        pair = " and ".join(sorted((source, target)))
        self._weather(f"slow {pair}", f"{pair}: {extra_s * 1000:g} ms late" if extra_s else "")

    def network_degraded(self, loss: float, duplicate: float, reorder: float) -> None:
        for what, share in (("loses", loss), ("repeats", duplicate), ("reorders", reorder)):
            text = f"the network {what} {share:.0%}" if share > 1e-9 else ""
            self._weather(what, text)

    def _weather(self, key: str, text: str) -> None:
        began = self._open.get(("weather", key))
        if began is not None and began[1] != text:
            self._close(("weather", key))
            began = None
        if text and began is None:
            self._begin(("weather", key), text)

    def _begin(self, key: tuple[Any, ...], label: str) -> None:
        self._open.setdefault(key, (self._now, label))

    def _close(self, key: tuple[Any, ...], end: int | None = None) -> None:
        began = self._open.pop(key, None)
        if began is not None:
            lane = -1 if key[0] == "weather" else self._lane(key[1])
            self._spans.append([key[0], lane, began[0], end or self._now, began[1]])

    # Stores.

    def asked(self, name: str, operation: str, about: str) -> int:
        if self.crowded:
            return -1
        category = _STORE_CATEGORIES.get(operation, "questions")
        says = _REQUESTS.get(operation, f"{operation.capitalize()} {{about}}.")
        kind = phrases.Phrase(operation, category, "", says)
        _, number = self._append(name, STORE, kind, -1, (unquote(about),))
        return number

    def answered(self, number: int, result: str) -> None:
        request = self._row(number)
        if request is not None:
            self._arrive(request)
            asked = self._kind(request)
            kind = phrases.Phrase(f"answer to {asked.name}", asked.category, "", "{result}")
            process = list(self._lanes)[request[2]]
            row, _ = self._append(STORE, process, kind, number, (unquote(result),))
            self._answers[number] = row

    def received(self, number: int) -> None:
        row = self._answers.pop(number, None)
        if row is not None:
            self._arrive(row)

    def notified(self, name: str, scope: str) -> int:
        if self.crowded:
            return -1
        kind = phrases.Phrase("notification", "notifications", "", "{scope} has changed.")
        row, number = self._append(STORE, name, kind, -1, (unquote(scope),))
        self._answers[number] = row
        return number

    def _arrive(self, row: list[Any]) -> None:
        row[1], row[5] = self._now, FATES.index(ARRIVED)

    def _kind(self, row: list[Any]) -> phrases.Phrase:
        number: int = row[4]
        return list(self._kinds)[number]

    # The narration.

    def reported(self, subject: str, predicate: str) -> None:
        self._narrator.add(self._clock(), subject, predicate)
        if icon_of(predicate) in ("fault", "healed", "order"):
            for name in phrases.names_in(subject, self._lanes):
                self._marks.append([self._now, self._lane(name), predicate])

    def mark(self, at: float, name: str, label: str) -> None:
        """Mark an instant on a lane."""
        self._last = max(self._last, _micro(at))
        self._marks.append([_micro(at), self._lane(name), label])

    # The result.

    def finish(self, violations: Sequence[Violation] = ()) -> dict[str, Any]:
        """The recording, as an object for JSON."""
        end = max([self._last, *(_micro(each.at) for each in violations)])
        for key in list(self._open):
            self._close(key, end)
        self._cuts += [(*link, began, end) for link, began in self._links.items()]
        messages = list(self._messages)
        first = self._sent - len(messages)
        for row in messages:
            row[6] = max(-1, row[6] - first)
        return {
            "lanes": list(self._lanes),
            "servers": len(self._servers),
            "generation": self._generation,
            "end": end,
            "labels": list(self._labels.numbers),
            "reasons": list(self._reasons.numbers),
            "fates": list(FATES),
            "kinds": [kind._asdict() for kind in self._kinds],
            "roles": self._roles,
            "logs": self._rows,
            "bases": self._bases,
            "first": first,
            "messages": messages,
            "spans": [*self._spans, *self._cut_spans()],
            "marks": self._marks,
            "story": self._story(violations),
            "violations": [self._violation(each) for each in violations],
        }

    def _story(self, violations: Sequence[Violation]) -> list[list[Any]]:
        if self.transcript is not None:
            return [[_micro(at), icon, text] for at, icon, text in self.transcript]
        lines = [
            [_micro(at), icon_of(predicate), sentence(subject, predicate)]
            for at, subject, predicate in self._narrator.lines
        ]
        return lines + [
            [_micro(each.at), "violation", f"{each.kind}: {each.text}"] for each in violations
        ]

    def _violation(self, violation: Violation) -> Mapping[str, Any]:
        lanes = [self._lanes[name] for name in phrases.names_in(violation.text, self._lanes)]
        return {
            "at": _micro(violation.at),
            "kind": violation.kind,
            "text": violation.text,
            "lanes": lanes,
        }

    def _cut_spans(self) -> list[list[Any]]:
        """For each lane, from when to when it cannot reach some of the others."""
        spans: list[list[Any]] = []
        for name, lane in self._lanes.items():
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
        others = [other for other in self._lanes if other != name and other != STORE]
        silent = [other for other in others if (name, other) in cuts]
        deaf = [other for other in others if (other, name) in cuts]
        if not silent and not deaf:
            return "", 0.0
        if silent == deaf:
            whom = "everybody" if len(silent) == len(others) else _listed(silent)
            return f"cut off from {whom}", round(len(silent) / len(others), 2)
        parts = [f"cannot send to {_listed(silent)}"] if silent else []
        parts += [f"does not hear {_listed(deaf)}"] if deaf else []
        return "; ".join(parts), round(max(len(silent), len(deaf)) / len(others), 2)


_REQUESTS = {
    "grant": "Grant me a lease of {about} s.",
    "renew": "Renew my lease.",
    "create": "Create {about}, unless it exists.",
    "enqueue": "Give me a ticket in {about}.",
    "ahead": "Who is ahead of me in {about}?",
    "watch": "Notify me when {about} changes.",
    "get": "What is {about}?",
    "list": "What is there under {about}?",
}
"""What requests to a store say."""
_STORE_CATEGORIES = {
    **dict.fromkeys(("create", "delete", "update", "put", "enqueue", "grant", "revoke"), "changes"),
    "renew": "renewals",
}


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
