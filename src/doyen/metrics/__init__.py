"""Metrics of sessions and of elections, for Prometheus and OpenTelemetry.

    meters.py        what is counted and measured, from the events of sessions. Pure
    prometheus.py    a collector for `prometheus_client` (extra `prometheus`)
    opentelemetry.py instruments and spans of OpenTelemetry's API (extra `opentelemetry`)
    histogram.py     a histogram, also for the nodes of a quorum
    grafana.json     a dashboard, and alerts.yaml, alert rules for Prometheus

A `SessionMeters` is a sink: pass it as `on_event` to `connect`. What only the store knows, such as
the length of a line, comes from observing its inventory (`SessionMeters.observe`).
"""

from doyen.metrics.meters import ElectionMeter, SessionMeters

__all__ = ["ElectionMeter", "SessionMeters"]
