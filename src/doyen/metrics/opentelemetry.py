"""Instruments and spans of OpenTelemetry's API. What is done with them is up to the SDK.

    from doyen.metrics.opentelemetry import OpenTelemetryMetrics

    async with doyen.connect(url, on_event=OpenTelemetryMetrics()) as session:
        ...

The span `doyen.election` lasts from the loss of a term, or from joining the line, to the election
of the same candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from doyen.errors import ConfigError
from doyen.events import Record, Renewed
from doyen.lease.clock import Clock
from doyen.metrics.meters import CANDIDATE, INSTRUMENTS, Instrument, Interval, SessionMeters

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
        for each in INSTRUMENTS:
            create: Callable[..., object] = meter.create_observable_gauge
            if each.counts:
                create = meter.create_observable_counter
            create(each.name, [partial(self._observe, each)], each.unit, each.text)
        self.on_record.append(self._measure)
        self.on_interval.append(self._trace)

    def _measure(self, record: Record) -> None:
        if isinstance(record.event, Renewed):
            self._renewal.record(record.event.took_s)

    def _trace(self, interval: Interval) -> None:
        attributes = {
            **_attributes(CANDIDATE, interval.candidate),
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

    def _observe(self, instrument: Instrument, _: CallbackOptions) -> Iterable[Observation]:
        for values, value in instrument.samples(self).items():
            yield Observation(value, _attributes(instrument.labels, values))


def _attributes(labels: Iterable[str], values: Iterable[str]) -> dict[str, str | int]:
    return {
        f"doyen.{'candidate' if label == 'name' else label}": value
        for label, value in zip(labels, values, strict=True)
    }
