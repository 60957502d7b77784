"""A collector for `prometheus_client`.

from doyen.metrics.prometheus import PrometheusMetrics

metrics = PrometheusMetrics()            # registers itself with the default registry
async with doyen.connect(url, on_event=metrics) as session:
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from doyen.errors import ConfigError
from doyen.lease.clock import Clock
from doyen.metrics.histogram import Histogram
from doyen.metrics.meters import INSTRUMENTS, SessionMeters

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
        return _families(SessionMeters())

    def collect(self) -> Iterator[Metric]:
        yield from _families(self)


def _families(meters: SessionMeters) -> Iterator[Metric]:
    for each in INSTRUMENTS:
        name = each.name.replace(".", "_") + ("_seconds" if each.unit == "s" else "")
        family = counter if each.counts else gauge
        yield family(name, each.text, each.labels, each.samples(meters))
    yield histogram(
        "doyen_renewal_seconds", "How long the store took to confirm renewals.", meters.renewals
    )
    yield histogram(
        "doyen_election_wait_seconds",
        "The time from a loss, or from joining the line, to the election.",
        meters.waits,
    )


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Mapping[Any, float],
) -> Metric:
    """The values of a metric, by those of its labels. `_total` is added to the name of counters."""
    family = kind(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric([str(each) for each in values], float(value))
    return family


gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)


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
