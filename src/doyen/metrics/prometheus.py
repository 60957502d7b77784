"""A collector for `prometheus_client`.

from doyen.metrics.prometheus import PrometheusMetrics

metrics = PrometheusMetrics()            # registers itself with the default registry
async with doyen.connect(url, on_event=metrics) as session:
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from doyen.errors import ConfigError
from doyen.lease.clock import Clock
from doyen.metrics.histogram import Histogram
from doyen.metrics.meters import SessionMeters

try:
    from prometheus_client.core import (
        REGISTRY,
        CollectorRegistry,
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError("prometheus_client is missing: pip install 'doyen[prometheus]'") from error

__all__ = ["PrometheusMetrics", "counter", "gauge", "histogram"]

CANDIDATE = ("kind", "election", "name")
ELECTION = ("kind", "election")


class PrometheusMetrics(SessionMeters, Collector):
    """The metrics of the sessions whose sink this is, collected when Prometheus asks."""

    def __init__(
        self, registry: CollectorRegistry | None = REGISTRY, *, clock: Clock | None = None
    ) -> None:
        """With `registry=None` it registers nowhere."""
        super().__init__(clock)
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The names of all metrics, also of those without a value yet."""
        return _families(SessionMeters(), described=True)

    def collect(self) -> Iterator[Metric]:
        yield from _families(self)


def _families(meters: SessionMeters, described: bool = False) -> Iterator[Metric]:
    leading = meters.leading()
    led = {key: held for key, held in leading.items() if held is not None}
    yield gauge(
        "doyen_leading",
        "Whether this candidate leads.",
        CANDIDATE,
        {key: float(held is not None) for key, held in leading.items()},
    )
    yield gauge(
        "doyen_token",
        "The fencing token of the term.",
        CANDIDATE,
        {key: float(held[0]) for key, held in led.items()},
    )
    yield gauge(
        "doyen_margin_seconds",
        "How long the term stays valid without a further renewal.",
        CANDIDATE,
        {key: held[1] for key, held in led.items()},
    )
    yield counter(
        "doyen_transitions",
        "Terms that began or ended, by cause.",
        (*CANDIDATE, "cause"),
        {(*key, cause): count for (key, cause), count in dict(meters.transitions).items()},
    )
    yield histogram(
        "doyen_renewal_seconds", "How long the store took to confirm renewals.", meters.renewals
    )
    yield histogram(
        "doyen_election_wait_seconds",
        "The time from a loss, or from joining the line, to the election.",
        meters.waits,
    )
    yield counter(
        "doyen_store_errors",
        "Requests to the store that failed, by what they were for.",
        ("call",),
        {(call,): count for call, count in dict(meters.store_errors).items()},
    )
    for name, text, value in (
        ("doyen_lease_losses", "Leases of this process that were lost.", meters.lease_losses),
        ("doyen_overruns", "Terms whose work ended after its stop budget.", meters.overruns),
        ("doyen_events_dropped", "Events that were dropped before they came here.", meters.dropped),
    ):
        yield counter(name, text, (), {(): value})
    if meters.reachable is not None or described:
        yield from _store(meters)


def _store(meters: SessionMeters) -> Iterator[Metric]:
    seen = meters.seen_elections()
    elections = {key: each for key, each in seen.items() if key.kind == "elections"}
    yield gauge(
        "doyen_store_reachable",
        "Whether the store answers.",
        (),
        {(): float(meters.reachable or False)},
    )
    age_s = meters.answer_age_s
    yield gauge(
        "doyen_store_answer_age_seconds",
        "How long ago the store answered last.",
        (),
        {} if age_s is None else {(): age_s},
    )
    yield gauge(
        "doyen_election_led",
        "Whether an election has a leader, or a lock a holder.",
        ELECTION,
        {key: float(each.led) for key, each in seen.items()},
    )
    yield gauge(
        "doyen_election_wanted",
        "Whether an election should have a leader: 0 if the last resigned and nobody stands.",
        ELECTION,
        {key: float(each.wanted) for key, each in elections.items()},
    )
    yield gauge(
        "doyen_election_line_length",
        "How many candidates wait.",
        ELECTION,
        {key: float(each.line_length) for key, each in seen.items()},
    )
    yield counter(
        "doyen_election_leader_changes",
        "Changes of leader or holder that were seen.",
        ELECTION,
        {key: each.leader_changes for key, each in seen.items()},
    )
    yield counter(
        "doyen_election_without_leader_seconds",
        "The time for which an election was seen without a leader.",
        ELECTION,
        {key: each.without_leader_s for key, each in elections.items()},
    )


Samples = dict[tuple[str, ...], float] | dict[tuple[str, ...], int]


def gauge(name: str, text: str, labels: Sequence[str], samples: object) -> Metric:
    """A family of gauges, by the values of their labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    assert isinstance(samples, dict)
    for values, value in samples.items():
        family.add_metric([str(each) for each in values], value)
    return family


def counter(name: str, text: str, labels: Sequence[str], samples: object) -> Metric:
    """A family of counters; `_total` is added to the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    assert isinstance(samples, dict)
    for values, value in samples.items():
        family.add_metric([str(each) for each in values], value)
    return family


def histogram(
    name: str,
    text: str,
    seen: Histogram,
    labels: Sequence[str] = (),
    more: dict[tuple[str, ...], Histogram] | None = None,
) -> Metric:
    """A histogram, or with `more` one for each of the labels' values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, each in ({(): seen} if more is None else more).items():
        buckets = [
            ("+Inf" if bound == float("inf") else repr(bound), float(count))
            for bound, count in each.cumulative()
        ]
        family.add_metric(list(values), buckets, each.sum_s)
    return family
