"""What a scenario is: a narration that is made as it happens, and facts that are asserted.

A scenario is a function that takes a `Script`, lets something happen in a world of the lab, says
what it sees and in the end asserts what the document teaches. It takes no chance and no time from
outside, so that it tells the same every time.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Played", "Scenario", "ScenarioFact", "Script", "listed"]

TOGETHER_S = 0.5
"""What several do within this is told as one thing."""
_PLURALS = {"is": "are", "has": "have", "does": "do"}


@dataclass(frozen=True, slots=True)
class ScenarioFact:
    """What a scenario asserts, as a sentence, and whether it was so."""

    text: str
    held: bool


@dataclass(slots=True)
class Played:
    """A scenario that has been acted."""

    lines: list[str] = field(default_factory=list)
    facts: list[ScenarioFact] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(fact.held for fact in self.facts)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that a document teaches."""

    title: str
    """What it shows, in a line."""
    source: str
    """Which document tells of it, and where."""
    perform: Callable[[Script], None]


class Script:
    """Takes down what is said and asserted."""

    def __init__(self) -> None:
        self.facts: list[ScenarioFact] = []
        self._said: list[tuple[float | None, list[str], str]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is said meanwhile is not for the audience."""
        said, self._said = self._said, []
        try:
            yield
        finally:
            self._said = said

    def say(self, at: float, who: str, what: str) -> None:
        """Somebody does something. `what` begins with the verb; what several do in a row is told
        once."""
        if self._said:
            before, those, done = self._said[-1]
            if before is not None and those and done == what and at - before < TOGETHER_S:
                if who not in those:
                    those.append(who)
                return
        self._said.append((at, [who], what))

    def happens(self, at: float, what: str) -> None:
        """Something happens to nobody in particular."""
        self._said.append((at, [], what))

    def note(self, text: str) -> None:
        """A word to the reader."""
        self._said.append((None, [], text))

    def fact(self, text: str, held: bool) -> None:
        """Assert it."""
        self.facts.append(ScenarioFact(text, held))

    def end(self) -> Played:
        return Played([_line(*said) for said in self._said], self.facts)


def _line(at: float | None, those: list[str], what: str) -> str:
    if at is None:
        return what
    if len(those) > 1:
        verb, space, rest = what.partition(" ")
        what = _PLURALS.get(verb, verb.removesuffix("s")) + space + rest
    return f"{at:8.3f} s  {listed(those)} {what}" if those else f"{at:8.3f} s  {what}"


def listed(names: list[str]) -> str:
    """The names as a sentence has them.

    >>> listed(["server1", "server2", "server3"])
    'server1, server2 and server3'
    """
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
