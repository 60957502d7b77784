"""Instruments and spans of OpenTelemetry's API. What is done with them is up to the SDK.

    from doyen.metrics.opentelemetry import OpenTelemetryMetrics

    async with doyen.connect(url, on_event=OpenTelemetryMetrics()) as session:
        ...

The span `doyen.election` lasts from the loss of a term, or from joining the line, to the election
of the same candidate.
"""

from __future__ import annotations

from collections.abc import Iterable

from doyen.errors import ConfigError
from doyen.events import Hindered, LeaseLost, Overrun, Record, Renewed, Unsure
from doyen.lease.clock import Clock
from doyen.metrics.meters import CandidateKey, Interval, SessionMeters

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
    from opentelemetry.trace import Tracer, get_tracer
except ImportError as error:
    raise ConfigError("OpenTelemetry is missing: pip install 'doyen[opentelemetry]'") from error

__all__ = ["OpenTelemetryMetrics"]


class OpenTelemetryMetrics(SessionMeters):
    """The metrics of the sessions whose sink this is, and a span for each election."""

    def __init__(
        self,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        meter = meter or get_meter("doyen")
        self._tracer = tracer or get_tracer("doyen")
        self._renewal = meter.create_histogram(
            "doyen.renewal.duration", "s", "How long the store took to confirm renewals."
        )
        self._wait = meter.create_histogram(
            "doyen.election.wait",
            "s",
            "The time from a loss, or from joining the line, to the election.",
        )
        self._errors = meter.create_counter(
            "doyen.store.errors", "{error}", "Requests to the store that failed."
        )
        self._losses = meter.create_counter(
            "doyen.lease.losses", "{lease}", "Leases of this process that were lost."
        )
        self._overruns = meter.create_counter(
            "doyen.overruns", "{term}", "Terms whose work ended after its stop budget."
        )
        for name, observe, unit, text in (
            ("doyen.leading", self._observe_leading, "1", "Whether this candidate leads."),
            ("doyen.token", self._observe_token, "1", "The fencing token of the term."),
            (
                "doyen.margin",
                self._observe_margin,
                "s",
                "How long the term stays valid without a further renewal.",
            ),
            ("doyen.election.led", self._observe_led, "1", "Whether an election has a leader."),
            (
                "doyen.election.wanted",
                self._observe_wanted,
                "1",
                "Whether an election should have a leader.",
            ),
            (
                "doyen.election.line_length",
                self._observe_line,
                "{candidate}",
                "How many candidates wait.",
            ),
            ("doyen.store.reachable", self._observe_reachable, "1", "Whether the store answers."),
            (
                "doyen.store.answer_age",
                self._observe_age,
                "s",
                "How long ago the store answered last.",
            ),
        ):
            meter.create_observable_gauge(name, [observe], unit, text)
        for name, observe, unit, text in (
            (
                "doyen.transitions",
                self._observe_transitions,
                "{term}",
                "Terms that began or ended, by cause.",
            ),
            (
                "doyen.election.without_leader",
                self._observe_without,
                "s",
                "The time for which an election was seen without a leader.",
            ),
            (
                "doyen.election.leader_changes",
                self._observe_changes,
                "{change}",
                "Changes of leader or holder that were seen.",
            ),
            (
                "doyen.events.dropped",
                self._observe_dropped,
                "{event}",
                "Events that were dropped before they came here.",
            ),
        ):
            meter.create_observable_counter(name, [observe], unit, text)
        self.on_record.append(self._measure)
        self.on_interval.append(self._trace)

    def _measure(self, record: Record) -> None:
        match record.event:
            case Renewed(took_s=took_s):
                self._renewal.record(took_s)
            case Unsure():
                self._errors.add(1, {"doyen.call": "renewal"})
            case Hindered():
                self._errors.add(1, {"doyen.call": "campaign"})
            case LeaseLost():
                self._losses.add(1)
            case Overrun():
                self._overruns.add(1)
            case _:
                pass

    def _trace(self, interval: Interval) -> None:
        attributes = {
            **_attributes(interval.candidate),
            "doyen.cause": interval.cause,
            "doyen.token": interval.token,
        }
        self._wait.record(
            max(0.0, interval.ended - interval.began), {"doyen.cause": interval.cause}
        )
        span = self._tracer.start_span(
            "doyen.election", attributes=attributes, start_time=int(interval.began * 1e9)
        )
        span.end(end_time=int(interval.ended * 1e9))

    def _observe_leading(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, held in self.leading().items():
            yield Observation(int(held is not None), _attributes(key))

    def _observe_token(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, held in self.leading().items():
            if held is not None:
                yield Observation(held[0], _attributes(key))

    def _observe_margin(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, held in self.leading().items():
            if held is not None:
                yield Observation(held[1], _attributes(key))

    def _observe_transitions(self, _: CallbackOptions) -> Iterable[Observation]:
        for (key, cause), count in dict(self.transitions).items():
            yield Observation(count, {**_attributes(key), "doyen.cause": cause})

    def _observe_dropped(self, _: CallbackOptions) -> Iterable[Observation]:
        yield Observation(self.dropped)

    def _observe_reachable(self, _: CallbackOptions) -> Iterable[Observation]:
        if self.reachable is not None:
            yield Observation(int(self.reachable))

    def _observe_age(self, _: CallbackOptions) -> Iterable[Observation]:
        if (age_s := self.answer_age_s) is not None:
            yield Observation(age_s)

    def _observe_changes(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, each in self.seen_elections().items():
            attributes = {"doyen.kind": key.kind, "doyen.election": key.election}
            yield Observation(each.leader_changes, attributes)

    def _observe_led(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, each in self.seen_elections().items():
            yield Observation(
                int(each.led), {"doyen.kind": key.kind, "doyen.election": key.election}
            )

    def _observe_wanted(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, each in self.seen_elections().items():
            if key.kind == "elections":
                attributes = {"doyen.kind": key.kind, "doyen.election": key.election}
                yield Observation(int(each.wanted), attributes)

    def _observe_line(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, each in self.seen_elections().items():
            attributes = {"doyen.kind": key.kind, "doyen.election": key.election}
            yield Observation(each.line_length, attributes)

    def _observe_without(self, _: CallbackOptions) -> Iterable[Observation]:
        for key, each in self.seen_elections().items():
            if key.kind == "elections":
                yield Observation(each.without_leader_s, {"doyen.election": key.election})


def _attributes(key: CandidateKey) -> dict[str, str | int]:
    return {
        "doyen.kind": key.kind,
        "doyen.election": key.election,
        "doyen.candidate": key.name,
    }
