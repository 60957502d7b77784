"""A scenario: a function that records what happens and asserts facts.

A scenario takes a `Transcript`, runs something in a world of the lab, records what it sees and
finally asserts what the document teaches. It uses no randomness and no time from outside, so its
transcript is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

TOGETHER_S = 0.5
"""What several servers do within this time is one line."""
_PLURALS = {"is": "are", "has": "have", "does": "do"}


@dataclass(frozen=True, slots=True)
class ScenarioFact:
    """What a scenario asserts, as a sentence, and whether it holds."""

    text: str
    held: bool


@dataclass(slots=True)
class ScenarioResult:
    """The transcript and the facts of a scenario."""

    lines: list[str] = field(default_factory=list)
    facts: list[ScenarioFact] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(fact.held for fact in self.facts)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A lesson of a document."""

    title: str
    """What it shows, in one line."""
    source: str
    """The document, and the place in it."""
    run: Callable[[Transcript], None]


class Transcript:
    """Collects the lines and the facts of a scenario."""

    def __init__(self) -> None:
        self.facts: list[ScenarioFact] = []
        self._lines: list[tuple[float | None, list[str], str]] = []

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Discard what is recorded meanwhile."""
        lines, self._lines = self._lines, []
        try:
            yield
        finally:
            self._lines = lines

    def record(self, at: float, subject: str, predicate: str) -> None:
        """A server or client does something. The predicate begins with the verb; consecutive lines
        with the same predicate become one line."""
        if self._lines:
            before, subjects, last = self._lines[-1]
            if before is not None and subjects and last == predicate and at - before < TOGETHER_S:
                if subject not in subjects:
                    subjects.append(subject)
                return
        self._lines.append((at, [subject], predicate))

    def record_event(self, at: float, text: str) -> None:
        """Something happens that is not an action of one server or client."""
        self._lines.append((at, [], text))

    def note(self, text: str) -> None:
        """An explanation for the reader."""
        self._lines.append((None, [], text))

    def violation(self, at: float, text: str) -> None:
        """A checker of the lab finds that something does not hold, and ends the run."""
        self.record_event(at, "the lab's checker stops the run:")
        self.note(f"             {text}")

    def opened(self, world: Any) -> None:
        """A world is made, which tells its story to this transcript."""

    def closed(self, world: Any) -> None:
        """The run of a world is over."""

    def fact(self, text: str, held: bool) -> None:
        self.facts.append(ScenarioFact(text, held))

    def end(self) -> ScenarioResult:
        return ScenarioResult([_line(*line) for line in self._lines], self.facts)


def _line(at: float | None, subjects: list[str], text: str) -> str:
    return text if at is None else f"{at:8.3f} s  {sentence(subjects, text)}"


def sentence(subjects: list[str], text: str) -> str:
    """What some servers or clients do, or what happens without them, as a sentence.

    >>> sentence(["server1", "server2"], "is killed"), sentence([], "the network is cut")
    ('server1 and server2 are killed', 'the network is cut')
    """
    if len(subjects) > 1:
        verb, space, rest = text.partition(" ")
        text = _PLURALS.get(verb, verb.removesuffix("s")) + space + rest
    return f"{listed(subjects)} {text}" if subjects else text


def listed(names: list[str]) -> str:
    """The names as part of a sentence.

    >>> listed(["server1", "server2", "server3"])
    'server1, server2 and server3'
    """
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
