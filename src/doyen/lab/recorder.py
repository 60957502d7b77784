"""Records a run so that it can be drawn: lanes, roles, logs, messages, faults and the story.

A `Recorder` observes one world (see `observer`) and collects rows of numbers, which `finish`
returns as an object for JSON. Its size is bounded: of the messages, the last `MOST_MESSAGES` are
kept. Times are whole microseconds of virtual time. `pages` draws the result. The rows, which are
collected in `recording_tables`:

    roles      lane, from, role, label
    logs       lane, index, generation, from, committed at, until; -1 where it has not happened
    bases      lane, from, index: entries up to this index are there and have no rows
    messages   sent, arrives, from, to, kind, fate, answers, reason, and the values of the sentence
    spans      kind, lane, from, to, label
    marks      at, lane, label
    story      at, icon, text
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from doyen.lab import phrases
from doyen.lab.narration import Narrator, sentence
from doyen.lab.observer import Fate, WorldObserver
from doyen.lab.outcome import Violation
from doyen.lab.protocols import Protocol
from doyen.lab.recording_tables import (
    DOWN,
    FATES,
    FOLLOWING,
    LEADING,
    LOOKING,
    STORE,
    Instants,
    LaneTable,
    LogTable,
    MessageTable,
    SpanTable,
    listed,
    microseconds,
)
from doyen.quorum.consensus.core import (
    Committed,
    Core,
    CoreEvent,
    Effect,
    Install,
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

MOST_LANES = 24

_ROLES = {Role.LOOKING: LOOKING, Role.FOLLOWING: FOLLOWING, Role.LEADING: LEADING}

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
        self._instants = Instants(now)
        self._protocol = protocol
        self._generation = generation
        self._whole_nodes = whole_nodes
        self._servers = list(names)
        self._lanes = LaneTable(self._instants)
        self._logs = LogTable()
        self._messages = MessageTable(
            self._instants, self._lanes, protocol.name if protocol else ""
        )
        self._spans = SpanTable(self._instants, self._lanes)
        self._marks: list[list[Any]] = []
        self._narrator = Narrator()
        self._views: dict[str, phrases.VoterView] = {}
        self._committed = 0
        self._terms: dict[str, dict[str, int]] = {}
        """By process: the tokens of the elections that it leads."""
        self._elections: dict[str, None] = {}
        self._answers: dict[int, list[Any]] = {}
        """Answers and notifications of the store that are under way."""
        self.transcript: list[tuple[float, str, str]] | None = None
        """Lines that replace the narration, if given: time, icon and text."""
        for name in (*names, *others):
            self._lanes.number(name)

    @property
    def crowded(self) -> bool:
        """Whether there are more lanes than a reader could follow. Requests to a store are then no
        longer recorded."""
        return len(self._lanes.numbers) > MOST_LANES

    # Servers.

    def _ignored_process(self, name: str) -> bool:
        """Whether a process has no lane: a client of whole nodes."""
        return self._whole_nodes and name not in self._lanes.numbers

    def started(self, name: str, core: Core | None, recovered: Recovered | None) -> None:
        if core is None and self._ignored_process(name):
            return
        if core is None:
            self._lanes.set_role(name, FOLLOWING, "serves" if name == STORE else "waits")
            return
        if name not in self._servers:
            self._servers.append(name)
        log = self._logs.add(name, self._lanes.number(name))
        if recovered is not None:
            base = recovered.snapshot.index if recovered.snapshot is not None else 0
            generations = [entry.generation for entry in recovered.entries]
            log.start(self._instants.now(), base, generations, core.commit)
        self._views[name] = phrases.voter_view(core)
        self._role_changed(name, core.role, core.generation, core.leader)

    def stopped(self, name: str) -> None:
        if self._ignored_process(name):
            return
        self._lanes.set_role(name, DOWN, "is down")
        self._terms.pop(name, None)
        self._spans.close("paused", name)
        if name in self._logs.of:
            self._logs.of[name].end(self._instants.now())

    def paused(self, name: str, paused: bool) -> None:
        if self._ignored_process(name):
            return
        if paused:
            self._spans.begin("paused", name, "paused")
        else:
            self._spans.close("paused", name)

    def clock_adjusted(self, name: str, rate: float | None, jump_s: float) -> None:
        if rate is not None:
            self._spans.close("clock", name)
            if rate != 1.0:
                self._spans.begin("clock", name, f"clock runs at {rate:g} times the true rate")
        if jump_s:
            self._mark(self._instants.now(), name, f"clock jumps {jump_s:g} s ahead")

    def term_changed(
        self,
        name: str,
        token: int | None,
        *,
        election: str = "",
        ended_at: float | None = None,
    ) -> None:
        if self._ignored_process(name) or self._lanes.is_down(name):
            return
        terms = self._terms.setdefault(name, {})
        self._elections[election] = None
        if token is not None:
            terms[election] = token
        else:
            terms.pop(election, None)
        if len(self._elections) > 1 and terms:
            label = f"leads {listed([each.strip('/') for each in terms])}"
        else:
            label = "".join(f"leads, token {held}" for held in terms.values()) or "waits"
        now = self._instants.now()
        at = now if ended_at is None else min(now, microseconds(ended_at))
        self._lanes.set_role(name, LEADING if terms else FOLLOWING, label, at)

    def _role_changed(self, name: str, role: Role, generation: int, leader: str | None) -> None:
        word = self._generation
        match role:
            case Role.LEADING:
                label = f"leads, {word} {generation}"
            case Role.FOLLOWING:
                label = f"follows {leader}"
            case _:
                label = f"looks, {word} {generation}"
        self._lanes.set_role(name, _ROLES[role], label)

    # Steps of cores.

    def stepped(self, name: str, core: Core, event: CoreEvent, effects: Sequence[Effect]) -> None:
        before = self._views.get(name)
        cause = -1
        if type(event) is Received:
            cause = self._messages.receive(name, event)
        elif type(event) is SnapshotReceived:
            self._messages.receive_snapshot(event.peer, name)
        answered = False
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                assert isinstance(effect, Send)
                answered |= self._prepare(name, before, event, effect, cause)
            elif kind is SendSnapshot:
                assert isinstance(effect, SendSnapshot)
                self._messages.send_snapshot(name, effect.peer)
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
            self._narrator.add_votes(self._instants.seconds(), name, self._protocol, effects)
        self._views[name] = phrases.voter_view(core)

    def _changed(self, name: str, effect: Effect) -> None:
        """A server writes, commits or changes its role."""
        log = self._logs.of.get(name)
        match effect:
            case RoleChanged(role, generation, leader):
                self._role_changed(name, role, generation, leader)
            case Persist(first=first, entries=entries, keep=keep) if first and log is not None:
                generations = [entry.generation for entry in entries]
                log.write(self._instants.now(), first, generations, keep=keep)
            case Committed(first, entries) if log is not None:
                generations = [entry.generation for entry in entries]
                log.commit(self._instants.now(), first, generations)
                self._tell_commit(first, generations)
            case Install(snapshot) if log is not None:
                log.start(self._instants.now(), snapshot.index, (), snapshot.index)

    def _tell_commit(self, first: int, generations: Sequence[int]) -> None:
        last = first + len(generations) - 1
        if last <= self._committed:
            return
        first, self._committed = self._committed + 1, last
        holders = self._logs.holders(last, generations[-1])
        have = f"{listed(holders)} {'have' if len(holders) > 1 else 'has'} it"
        lines = self._narrator.lines
        if lines and lines[-1][2].startswith(("entry ", "entries ")) and not lines[-1][1]:
            at, _, text = lines.pop()
            first = int(text.split()[1])
        else:
            at = self._instants.seconds()
        what = phrases.entries_text(range(first, last + 1))
        verb, have = ("is", f": {have}") if first == last else ("are", "")
        lines.append((at, "", f"{what} {verb} committed{have}"))

    # Messages.

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
            self._lanes.set_role(name, LOOKING, label)
        if answers and before is not None:
            assert isinstance(event, Received)
            if phrases.asks_for_vote(event.message) and hasattr(effect.message, "granted"):
                text = phrases.reason(before, event.peer, event.message, effect.message)
                why = self._messages.reasons.number(text) if text else -1
                self._tell_vote(name, effect)
        answered = cause if answers else -1
        if self._whole_nodes:
            self._messages.send_unseen(name, effect.peer, message, answered, why)
        else:
            self._messages.prepare(effect.peer, message, answered, why)
        return answers

    def _tell_vote(self, name: str, effect: Send) -> None:
        if type(effect.message).__name__ == "PreVoteReply":
            return
        if getattr(effect.message, "granted", False):
            self._lanes.set_role(name, LOOKING, f"voted for {effect.peer}")
        else:
            text = f"refuses {effect.peer} its vote"
            if (lines := self._narrator.lines) and lines[-1][1:] == (name, text):
                return
            self._narrator.add(self._instants.seconds(), name, text)

    def _ignored(self, before: phrases.VoterView, event: Received, number: int) -> None:
        text = phrases.reason(before, event.peer, event.message, None)
        row = self._messages.row(number)
        if text and row is not None:
            row[7] = self._messages.reasons.number(f"{before.name} does not answer: {text}")

    def sent(self, link: SimulatedLink, event: Received, result: float | Fate) -> None:
        self._messages.send(link.source.id, link.target.id, event, result)

    # The network.

    def link_changed(self, source: str, target: str, cut: bool, extra_s: float) -> None:
        if source not in self._lanes.numbers or target not in self._lanes.numbers:
            return
        self._spans.set_cut(source, target, cut)
        pair = " and ".join(sorted((source, target)))
        late = f"{pair}: {extra_s * 1000:g} ms late" if extra_s else ""
        self._spans.set_weather(f"slow {pair}", late)

    def network_degraded(self, loss: float, duplicate: float, reorder: float) -> None:
        for what, share in (("loses", loss), ("repeats", duplicate), ("reorders", reorder)):
            text = f"the network {what} {share:.0%}" if share > 1e-9 else ""
            self._spans.set_weather(what, text)

    # Stores.

    def asked(self, name: str, operation: str, about: str) -> int:
        if self.crowded:
            return -1
        category = _STORE_CATEGORIES.get(operation, "questions")
        says = _REQUESTS.get(operation, f"{operation.capitalize()} {{about}}.")
        kind = phrases.Phrase(operation, category, "", says)
        _, number = self._messages.append(name, STORE, kind, -1, (unquote(about),))
        return number

    def answered(self, number: int, result: str) -> None:
        request = self._messages.row(number)
        if request is not None:
            self._messages.arrive(request)
            asked = self._messages.kind(request)
            kind = phrases.Phrase(f"answer to {asked.name}", asked.category, "", "{result}")
            process = list(self._lanes.numbers)[request[2]]
            row, _ = self._messages.append(STORE, process, kind, number, (unquote(result),))
            self._answers[number] = row

    def received(self, number: int) -> None:
        row = self._answers.pop(number, None)
        if row is not None:
            self._messages.arrive(row)

    def notified(self, name: str, scope: str) -> int:
        if self.crowded:
            return -1
        kind = phrases.Phrase("notification", "notifications", "", "{scope} has changed.")
        row, number = self._messages.append(STORE, name, kind, -1, (unquote(scope),))
        self._answers[number] = row
        return number

    # The narration.

    def reported(self, subject: str, predicate: str) -> None:
        self._narrator.add(self._instants.seconds(), subject, predicate)
        if icon_of(predicate) in ("fault", "healed", "order"):
            for name in phrases.names_in(subject, self._lanes.numbers):
                self._mark(self._instants.now(), name, predicate)

    def mark(self, at: float, name: str, label: str) -> None:
        """Mark an instant on a lane."""
        self._instants.include(at)
        self._mark(microseconds(at), name, label)

    def _mark(self, at: int, name: str, label: str) -> None:
        self._marks.append([at, self._lanes.number(name), label])

    # The result.

    def finish(self, violations: Sequence[Violation] = ()) -> dict[str, Any]:
        """The recording, as an object for JSON."""
        end = max([self._instants.last, *(microseconds(each.at) for each in violations)])
        spans = self._spans.finish(end)
        first, messages = self._messages.finish()
        return {
            "lanes": list(self._lanes.numbers),
            "servers": len(self._servers),
            "generation": self._generation,
            "end": end,
            "labels": list(self._lanes.labels.numbers),
            "reasons": list(self._messages.reasons.numbers),
            "fates": list(FATES),
            "kinds": [kind._asdict() for kind in self._messages.kinds],
            "roles": self._lanes.rows,
            "logs": self._logs.rows,
            "bases": self._logs.bases,
            "first": first,
            "messages": messages,
            "spans": spans,
            "marks": self._marks,
            "story": self._story(violations),
            "violations": [self._violation(each) for each in violations],
        }

    def _story(self, violations: Sequence[Violation]) -> list[list[Any]]:
        if self.transcript is not None:
            return [[microseconds(at), icon, text] for at, icon, text in self.transcript]
        lines = [
            [microseconds(at), icon_of(predicate), sentence(subject, predicate)]
            for at, subject, predicate in self._narrator.lines
        ]
        return lines + [
            [microseconds(each.at), "violation", f"{each.kind}: {each.text}"] for each in violations
        ]

    def _violation(self, violation: Violation) -> Mapping[str, Any]:
        numbers = self._lanes.numbers
        lanes = [numbers[name] for name in phrases.names_in(violation.text, numbers)]
        return {
            "at": microseconds(violation.at),
            "kind": violation.kind,
            "text": violation.text,
            "lanes": lanes,
        }


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
