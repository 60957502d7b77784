"""Records what a page shows: a run of a plan, or a scenario with its worlds one after the other.

A film is an object for JSON: a title, some facts, and scenes. A scene is a recording of one world
(see `recorder`), or, where a scenario uses a model instead of a world, only the lines that it
tells. Scenarios announce their worlds to their transcript, so a new scenario needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from doyen.lab.narration import narrate
from doyen.lab.outcome import RunOutcome, Violation
from doyen.lab.plan import Plan
from doyen.lab.protocols import Protocol
from doyen.lab.quorum import QuorumWorld
from doyen.lab.recorder import Recorder, icon_of
from doyen.lab.recording_tables import STORE
from doyen.lab.scenarios import SCENARIOS, ScenarioResult
from doyen.lab.scenarios.core_world import CoreWorld
from doyen.lab.scenarios.store_world import StoreWorld
from doyen.lab.scenarios.transcript import Transcript, sentence
from doyen.lab.world import World


def record_run(
    plan: Plan, protocol: Protocol | None = None, *, command: str = ""
) -> tuple[RunOutcome, list[str], dict[str, Any]]:
    """Run a plan. Returns the outcome, the narration and the film. `command` is the command line
    that repeats the run."""
    recorders: list[Recorder] = []

    def observe(world: World | QuorumWorld) -> None:
        recorder = _watch(world)
        world.observer = recorder
        recorders.append(recorder)

    outcome, narration = narrate(plan, protocol, observe)
    scene = recorders[0].finish(outcome.violations)
    film = {
        "title": f"{plan.protocol}, {plan.nodes} nodes, seed {plan.seed}",
        "chips": [
            plan.protocol,
            f"{plan.nodes} nodes",
            f"seed {plan.seed}",
            f"{len(plan.faults)} faults",
            *(["whole nodes"] if plan.world == "quorum" else []),
        ],
        "events": outcome.events,
        "trace": outcome.trace_hash,
        "command": command,
        "facts": [],
        "notes": [],
        "scenes": [{"title": "", **scene}],
    }
    return outcome, narration, film


def _watch(world: World | QuorumWorld) -> Recorder:
    if isinstance(world, World):
        return Recorder(
            lambda: world.now,
            list(world.servers),
            protocol=world.protocol,
            generation="epoch" if world.protocol.name == "zab" else "generation",
        )
    candidates = [f"c{number}" for number in range(1, world.plan.clients + 1)]
    return Recorder(
        lambda: world.loop.time() if hasattr(world, "loop") else 0.0,
        world.plan.names,
        protocol=world.protocol,
        others=candidates,
        whole_nodes=True,
    )


# Scenarios.


def record_scenario(name: str) -> tuple[ScenarioResult, dict[str, Any]]:
    """Run a scenario. Returns its result and the film. Raises `KeyError` if there is none of that
    name."""
    scenario = SCENARIOS[name]
    transcript = FilmedTranscript()
    scenario.run(transcript)
    result = transcript.end()
    scenes, notes = transcript.scenes()
    film = {
        "title": scenario.title,
        "chips": [name, scenario.source],
        "events": sum(len(scene["messages"]) for scene in scenes),
        "trace": "",
        "command": f"doyen lab scenario {name}",
        "facts": [[fact.text, fact.held] for fact in result.facts],
        "notes": notes,
        "scenes": scenes,
    }
    return result, film


class _Scene:
    """The lines that belong to one world, or to a model."""

    def __init__(self, titles: list[str], recorder: Recorder | None) -> None:
        self.titles = titles
        self.recorder = recorder
        self.lines: list[tuple[float, str, str, list[str]]] = []
        """Time, icon, text, and the participants that act."""
        self.violations: list[Violation] = []


class FilmedTranscript(Transcript):
    """A transcript that also records the worlds of its scenario."""

    def __init__(self) -> None:
        super().__init__()
        self._scenes: list[_Scene] = []
        self._notes: list[str] = []
        """Notes that belong to the next scene, unless a line of this one follows."""
        self._now: Callable[[], float] | None = None
        """The time of the current world, while it runs."""
        self._silent = False

    def opened(self, world: Any) -> None:
        recorder: Recorder | None = None
        if isinstance(world, CoreWorld):
            recorder = _watch(world)
        elif isinstance(world, StoreWorld):
            recorder = Recorder(lambda: world.now, (), others=(STORE,))
            recorder.started(STORE, None, None)
        if recorder is not None:
            world.observer = recorder
            self._now = lambda: float(world.now)
            self._begin(recorder)

    def closed(self, world: Any) -> None:
        self._now = None
        if world.title:
            self._scenes[-1].titles.append(world.title)

    def _begin(self, recorder: Recorder | None) -> None:
        titles = [note for note in self._notes if note]
        self._notes = []
        self._scenes.append(_Scene(titles, recorder))

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._silent, before = True, self._silent
        try:
            with super().muted():
                yield
        finally:
            self._silent = before

    def record(self, at: float, subject: str, predicate: str) -> None:
        before = len(self._lines)
        super().record(at, subject, predicate)
        scene = self._scene_at(at)
        if self._silent:
            return
        if len(self._lines) == before and scene.lines:  # it became part of the line before
            since, icon, _, subjects = scene.lines[-1]
            if subject not in subjects:
                subjects.append(subject)
            scene.lines[-1] = (since, icon, self._last_line(), subjects)
        else:
            scene.lines.append((at, icon_of(predicate), self._last_line(), [subject]))

    def _last_line(self) -> str:
        _, subjects, text = self._lines[-1]
        return sentence(subjects, text)

    def record_event(self, at: float, text: str) -> None:
        super().record_event(at, text)
        scene = self._scene_at(at)
        if not self._silent:
            scene.lines.append((at, icon_of(text), text, []))

    def note(self, text: str) -> None:
        super().note(text)
        if not self._silent:
            self._notes.append(text)

    def violation(self, at: float, text: str) -> None:
        super().record_event(at, "the lab's checker stops the run:")
        super().note(f"             {text}")
        scene = self._scene_at(at)
        scene.lines.append((at, "violation", f"the lab's checker stops the run: {text}", []))
        scene.violations.append(Violation("invariant", at, text))

    def _scene_at(self, at: float) -> _Scene:
        """The scene of a line: that of the current world if the line is of its present, and
        otherwise one without a world."""
        current = self._scenes[-1] if self._scenes else None
        if current is not None and current.recorder is not None:
            if self._now is not None and abs(self._now() - at) < 1e-9:
                self._tell_notes(current, at)
                return current
            current = None
        if current is None or self._notes:
            self._now = None
            self._begin(None)
            current = self._scenes[-1]
        return current

    def _tell_notes(self, scene: _Scene, at: float) -> None:
        scene.lines += [(at, "note", note, []) for note in self._notes if note]
        self._notes = []

    def scenes(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The recordings, and the notes after the last of them."""
        return [
            {"title": " ".join(scene.titles), **_finish(scene)}
            for scene in self._scenes
            if scene.recorder is None or not scene.recorder.crowded
        ], self._notes


def _finish(scene: _Scene) -> dict[str, Any]:
    recorder = scene.recorder
    if recorder is None:
        ends = max((at for at, *_ in scene.lines), default=0.0)
        names = dict.fromkeys(name for *_, subjects in scene.lines for name in subjects)
        recorder = Recorder(lambda: ends, list(names))
        for at, _, text, subjects in scene.lines:
            for name in subjects:
                recorder.mark(at, name, text)
    recorder.transcript = [(at, icon, text) for at, icon, text, _ in scene.lines]
    return recorder.finish(scene.violations)
