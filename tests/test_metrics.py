"""Metrics: what events make of them, both exporters, and the dashboard and rules that use them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

import doyen
from candidates import Capture
from doyen import LeadershipLost
from doyen.cli import main
from doyen.events import Elected, PublishFailed, Record, Resigned
from doyen.lease.clock import VirtualClock
from doyen.manage.inventory import Inventory
from doyen.metrics import meters as meters_module
from doyen.metrics.histogram import Histogram
from doyen.metrics.meters import ENDS_S, RETIRED_S, Interval, SessionMeters
from doyen.metrics.opentelemetry import OpenTelemetryMetrics
from doyen.metrics.prometheus import PrometheusMetrics
from doyen.model import Leader, Line
from doyen.quorum.node import http as node_pages
from doyen.quorum.node.http import NodeMetrics
from doyen.testing.faults import Faults
from servers.fetch import Debian, Recipe, obtain
from support import TTL_S, Place, core_of, keepalive_of, virtual

PROMTOOL = Recipe(
    engine="prometheus",
    variable="DOYEN_PROMTOOL",
    name="promtool",
    found=("usr/bin/promtool",),
    sources=(Debian(("prometheus",), dependencies=False),),
)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample, by its name and labels."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True) if sample.labels else ''}": (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
    }


def labels(**given: str) -> str:
    return json.dumps({"kind": "elections", "election": "e", **given}, sort_keys=True)


@virtual
async def test_a_candidate_from_election_to_loss(place: Place) -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry, clock=place.clock)
    faults = Faults()
    session = await place.open(faults, sinks=(metrics,))
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a") as term:
            await asyncio.sleep(10.0)
            seen = values(registry)
            mine = labels(name="a")
            assert seen[f"doyen_leading{mine}"] == 1
            assert seen[f"doyen_token{mine}"] == term.token
            left_s = keepalive_of(session).valid_until - place.clock.now()
            assert seen[f"doyen_margin_seconds{mine}"] == pytest.approx(left_s)
            assert seen["doyen_renewal_seconds_count"] >= 4
            assert seen["doyen_election_wait_seconds_count"] == 1
            faults.cut()
            await asyncio.sleep(100.0)
    seen = values(registry)
    assert seen[f"doyen_leading{mine}"] == 0
    assert f"doyen_token{mine}" not in seen
    assert seen[f"doyen_transitions_total{labels(name='a', cause='elected')}"] == 1
    assert seen[f"doyen_transitions_total{labels(name='a', cause='expired')}"] == 1
    assert seen['doyen_store_errors_total{"call": "renewal"}'] > 0
    assert seen["doyen_lease_losses_total"] == 1
    await asyncio.sleep(60.0)
    faults.heal()
    async with session.campaign("e", name="a"):
        seen = values(registry)
        assert seen["doyen_election_wait_seconds_count"] == 2
        assert seen["doyen_election_wait_seconds_sum"] > 59, "from the loss to the election"
    assert b"doyen_leading{" in generate_latest(registry)


@pytest.mark.parametrize(
    "cause", ["expired", "stalled", "removed", "ordered", "ineligible", "resigned", "ended"]
)
@virtual
async def test_every_cause_of_an_end_is_told_apart(place: Place, cause: str) -> None:
    """The causes are found in the reasons as they really are."""
    meters, faults = SessionMeters(place.clock), Faults()
    session, other = await place.open(faults, sinks=(meters,)), await place.open()
    ending: asyncio.Task[Any] | None = None

    async def lead(**options: Any) -> None:
        nonlocal ending
        async with session.campaign("e", name="a", **options):
            await asyncio.sleep(1.0)
            match cause:
                case "resigned":
                    return
                case "expired":
                    faults.cut()
                case "removed":
                    ending = asyncio.create_task(other.resign("e", force=True))
                case "ordered":
                    ending = asyncio.create_task(other.resign("e"))
                case "ineligible":
                    await options["member"].drain()
                case "ended":
                    place.server.revoke(keepalive_of(session).lease.id)
                    keepalive_of(session).lose("the store has ended the lease")
            await asyncio.sleep(100.0)

    async def whole() -> None:
        if cause == "ineligible":
            async with session.member("g", name="m") as member:
                await lead(member=member)
        else:
            await lead(**({"stall_after_s": 2.0} if cause == "stalled" else {}))

    try:
        await whole()
    except LeadershipLost:
        pass
    faults.heal()
    if ending is not None:
        await ending
    ends = {each for (_, each), count in meters.transitions.items() if count}
    assert ends == {"elected", cause}


@virtual
async def test_what_only_the_store_knows(place: Place) -> None:
    registry, faults = CollectorRegistry(), Faults()
    metrics = PrometheusMetrics(registry, clock=place.clock)
    looking, one, two = await place.open(faults), await place.open(), await place.open()
    assert "doyen_store_reachable" not in values(registry), "nobody observes"
    observing = asyncio.create_task(metrics.observe(looking))
    stop = asyncio.Event()

    async def second() -> None:
        async with two.campaign("e", name="b"):
            await stop.wait()

    async with one.campaign("e", name="a"):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(1.0)
        seen = values(registry)
        assert seen["doyen_store_reachable"] == 1
        assert seen[f"doyen_election_led{labels()}"] == 1
        assert seen[f"doyen_election_line_length{labels()}"] == 1
    await asyncio.sleep(1.0)
    stop.set()
    await waiting
    await asyncio.sleep(30.0)
    seen = values(registry)
    assert seen[f"doyen_election_led{labels()}"] == 0
    assert seen[f"doyen_election_leader_changes_total{labels()}"] == 2
    without_s = seen[f"doyen_election_without_leader_seconds_total{labels()}"]
    assert without_s == pytest.approx(30.0, abs=0.5)
    faults.cut()
    await asyncio.sleep(2 * TTL_S)
    seen = values(registry)
    assert seen["doyen_store_reachable"] == 0
    assert seen["doyen_store_answer_age_seconds"] > TTL_S
    observing.cancel()
    await asyncio.wait({observing})
    assert not [name for name in values(registry) if "_store_" in name and "error" not in name]


@virtual
async def test_an_election_that_was_given_up_is_not_one_whose_leader_failed(place: Place) -> None:
    registry, faults = CollectorRegistry(), Faults()
    metrics = PrometheusMetrics(registry, clock=place.clock)
    looking, resigning, failing = await place.open(), await place.open(), await place.open(faults)
    observing = asyncio.create_task(metrics.observe(looking))

    def wanted(election: str) -> float | None:
        seen = values(registry)
        assert seen.get(f"doyen_election_led{labels(election=election)}", 0.0) == 0
        return seen.get(f"doyen_election_wanted{labels(election=election)}")

    # A name that doyen does not give, and whose trail cannot be read.
    place.server.create("elections/%0A/leader", b"{}", place.server.grant(1e6).id)
    async with resigning.campaign("retired", name="a"):
        await asyncio.sleep(5.0)
        place.server.delete("elections/%0A/leader")
        with pytest.raises(LeadershipLost):
            async with failing.campaign("failed", name="b"):
                await asyncio.sleep(5.0)
                faults.cut()
                await asyncio.sleep(100.0)
    await asyncio.sleep(4 * ENDS_S)
    assert (wanted("retired"), wanted("failed")) == (0, 1)
    async with resigning.campaign("retired", name="a"):
        await asyncio.sleep(1.0)
        assert values(registry)[f"doyen_election_wanted{labels(election='retired')}"] == 1
    await asyncio.sleep(RETIRED_S + 4 * ENDS_S)
    assert (wanted("retired"), wanted("failed")) == (None, 1)
    observing.cancel()
    await asyncio.wait({observing})


@virtual
async def test_opentelemetry_has_the_same_and_a_span_for_each_election(place: Place) -> None:
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    metrics = OpenTelemetryMetrics(
        MeterProvider([reader], shutdown_on_exit=False).get_meter("test"),
        tracing.get_tracer("test"),
        clock=place.clock,
    )
    faults = Faults()
    session = await place.open(faults, sinks=(metrics,))
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a"):
            await asyncio.sleep(5.0)
            faults.cut()
            await asyncio.sleep(100.0)
    await asyncio.sleep(60.0)
    faults.heal()
    async with session.campaign("e", name="a") as term:
        await asyncio.sleep(5.0)
        metrics.saw(await session.inventory())
        data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: [*metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    unobserved = {"doyen.store.answer_age"}
    assert set(found) == {*map(_instrument, PrometheusMetrics(None).describe())} - unobserved
    assert [point.value for point in found["doyen.store.reachable"]] == [1]
    (leading,) = found["doyen.leading"]
    assert (leading.value, leading.attributes["doyen.election"]) == (1, "e")
    causes = {point.attributes["doyen.cause"]: point.value for point in found["doyen.transitions"]}
    assert causes == {"elected": 2, "expired": 1}
    first, second = spans.get_finished_spans()
    assert first.name == second.name == "doyen.election"
    assert second.attributes is not None
    assert second.attributes["doyen.cause"] == "expired"
    assert second.attributes["doyen.token"] == term.token
    assert second.start_time is not None
    assert second.end_time is not None
    assert (second.end_time - second.start_time) / 1e9 >= 59.9, "from loss to election"
    tracing.shutdown()


def _instrument(family: Any) -> str:
    """How OpenTelemetry names what Prometheus has under this name."""
    known = {
        "doyen_renewal_seconds": "doyen.renewal.duration",
        "doyen_election_wait_seconds": "doyen.election.wait",
    }
    name = known.get(family.name) or str(family.name).removesuffix("_seconds").replace("_", ".")
    for words in ("line.length", "without.leader", "leader.changes", "answer.age"):
        name = name.replace(words, words.replace(".", "_"))
    return name


@virtual
async def test_a_campaign_that_was_given_up_is_no_part_of_the_next_wait(place: Place) -> None:
    meters = SessionMeters(place.clock)
    waits: list[Interval] = []
    meters.on_interval.append(waits.append)
    one, two = await place.open(), await place.open(sinks=(meters,))
    async with one.campaign("e", name="a"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0), two.campaign("e", name="b"):
                pass
        await asyncio.sleep(3600.0)
        trying = asyncio.create_task(_lead_once(two))
        await asyncio.sleep(5.0)
    await trying
    (wait,) = waits
    assert wait.ended - wait.began == pytest.approx(5.0, abs=0.5)


async def _lead_once(session: doyen.Session) -> None:
    async with session.campaign("e", name="b"):
        pass


@virtual
async def test_what_nobody_observes_any_more_is_not_exported(place: Place) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    metrics = OpenTelemetryMetrics(meter, clock=place.clock)
    session = await place.open()

    def exported() -> set[str]:
        data: Any = reader.get_metrics_data()
        scopes = [scope for each in data.resource_metrics for scope in each.scope_metrics]
        return {metric.name for scope in scopes for metric in scope.metrics}

    about_the_store = {"doyen.store.reachable", "doyen.store.answer_age", "doyen.election.led"}
    observing = asyncio.create_task(metrics.observe(session))
    async with session.campaign("e", name="a"):
        await asyncio.sleep(1.0)
        assert about_the_store <= exported()
        observing.cancel()
        await asyncio.wait({observing})
        assert not about_the_store & exported()


@virtual
async def test_leases_that_were_released_are_forgotten(place: Place) -> None:
    meters = SessionMeters(place.clock)
    session = await place.open(sinks=(meters,))
    for _ in range(10):
        async with session.campaign("e", name="a", stall_after_s=5 * TTL_S):
            await asyncio.sleep(TTL_S)
    assert len(meters._valid_until) <= 3


def test_names_that_are_not_used_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters_module, "KEPT_NAMES", 10)
    meters = SessionMeters(VirtualClock())
    for number in range(100):
        name, at = f"e{number}", float(number)
        elected = Elected(election=name, name="a", token=number, lease="l", valid_until=9.0)
        resigned = Resigned(election=name, name="a", token=number, lease="l")
        for event in (elected,) if number < 3 else (elected, resigned):
            meters(Record(event, at, at, "s", 1))
        line = Line(Leader(f"e{number}", "a", number + 1, {}))
        meters.saw(Inventory(as_of=float(number), elections={f"e{number}": line}))
    leading = meters.leading()
    assert [key.election for key, held in leading.items() if held] == ["e0", "e1", "e2"]
    assert len(leading) == 13
    assert len(meters.transitions) <= 3 + 2 * 10
    assert [key.election for key in meters.elections] == [f"e{n}" for n in range(89, 100)]


def test_many_sessions_and_threads_share_a_sink(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    url = f"memory://{tmp_path.name}"
    with (
        doyen.connect_blocking(url, on_event=metrics) as one,
        doyen.connect_blocking(url, on_event=metrics) as two,
        one.campaign("a", name="s1"),
        two.campaign("b", name="s2"),
    ):
        for session in (one, two):
            core_of(session).telemetry.flush()
        leading = {key.election for key, held in metrics.leading().items() if held}
        assert leading == {"a", "b"}


def test_a_name_that_cannot_be_encoded_does_not_end_all_scrapes() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    elected = Elected(election="e", name="s\udcff", token=1, lease="l", valid_until=9.0)
    metrics(Record(elected, 0.0, 0.0, "s", 1))
    assert rb'name="s\\udcff"' in generate_latest(registry)


async def test_many_scrapes_of_a_node_cost_as_much_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rendered on the loop that also serves the quorum."""
    rendered: list[object] = []

    def render(registry: object) -> bytes:
        rendered.append(registry)
        return b"x 1\n"

    monkeypatch.setattr(node_pages, "generate_latest", render)
    page = node_pages.pages(MagicMock(), MagicMock(), MagicMock(), Histogram(), {})["/metrics"]
    assert {page() for _ in range(100)} == {(200, node_pages.TEXT, b"x 1\n")}
    assert len(rendered) == 1
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: float("inf"))
    page()
    assert len(rendered) == 2


def test_a_histogram_counts_what_is_below_each_bound() -> None:
    seen = Histogram()
    for seconds in (0.0, 0.0001, 0.00011, 1000.0):
        seen.add(seconds)
    buckets = seen.cumulative()
    assert buckets[0] == (0.0001, 2)
    assert buckets[1] == (0.00025, 3)
    assert buckets[-1] == (float("inf"), 4)
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)


# The dashboard and the rules.


def known() -> set[str]:
    """The names of all metrics that exist, as queries name them."""
    names = set()
    for family in [*PrometheusMetrics(None).describe(), *_node_families()]:
        if family.type == "counter":
            names.add(f"{family.name}_total")
        elif family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
        else:
            names.add(family.name)
    return names


def _node_families() -> Iterator[Any]:
    """The families of a node, without one."""
    from unittest.mock import MagicMock

    driver, service = MagicMock(), MagicMock()
    driver.proposals.commits = Histogram()
    for part in (driver.status.return_value, service.condition.return_value):
        for name in ("generation", "commit", "applied", "snapshot", "pending", "full", "clients",
                     "watches", "keys", "leases", "bytes", "quota", "alarm", "state",
                     "revision", "disk_free", "disk_bytes"):  # fmt: skip
            setattr(part, name, 0)
    driver.status.return_value.membership.voters = (
        driver.status.return_value.membership.learners
    ) = ()
    errors = MagicMock(counts={})
    return NodeMetrics(driver, service, errors, Histogram(), {"n2": Histogram()}).collect()


def used(text: str) -> set[str]:
    return set(re.findall(r"\bdoyen_\w+", text))


def test_the_dashboard_uses_metrics_that_exist(capsys: Capture) -> None:
    assert main(["metrics", "dashboard"]) == 0
    dashboard = json.loads(capsys.readouterr().out)
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    assert len(queries) > 20
    assert used(" ".join(queries)) <= known()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    shown = {name.removesuffix("_bucket").removesuffix("_total") for name in used(str(queries))}
    everything = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in known()}
    assert len(shown) >= 0.6 * len(everything), "what is measured is shown"


def test_the_rules_use_metrics_that_exist(capsys: Capture) -> None:
    assert main(["metrics", "alerts"]) == 0
    rules = capsys.readouterr().out.split("- alert: ")[1:]
    assert len(rules) >= 10
    for rule in rules:
        (expression,) = re.findall(r"^ +expr: (.+)$", rule, re.MULTILINE)
        assert used(expression)
        assert used(expression) <= known()
        assert re.search(r"severity: (warning|critical)\n", rule)
        families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known()}
        assert used(rule) <= known() | families


def test_promtool_accepts_the_rules_and_what_a_process_exports(tmp_path: Path) -> None:
    promtool = obtain(PROMTOOL)
    rules = str(files("doyen.metrics") / "alerts.yaml")
    checked = subprocess.run(
        [promtool.path, "check", "rules", rules], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    with (
        doyen.connect_blocking(f"memory://{tmp_path.name}", on_event=metrics) as session,
        session.campaign("e", name="a"),
    ):
        metrics.saw(session.inventory("elections", "locks"))
        core_of(session).telemetry.flush()
        text = generate_latest(registry)
    linted = subprocess.run(
        [promtool.path, "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert linted.returncode == 0, linted.stderr.decode()
    for name, values, firing in SITUATIONS:
        test = tmp_path / f"{name}.yaml"
        test.write_text(json.dumps(_situation(values, firing)))
        tried = subprocess.run(
            [promtool.path, "test", "rules", str(test)], capture_output=True, text=True, timeout=60
        )
        assert tried.returncode == 0, f"{name}: {tried.stdout}{tried.stderr}"


HEALTHY = {
    "doyen_election_led": "1x20",
    "doyen_election_wanted": "1x20",
    "doyen_store_reachable": "1x20",
    "doyen_margin_seconds": "3x20",
    'doyen_renewal_seconds_bucket{le="0.5"}': "0+60x20",
    'doyen_renewal_seconds_bucket{le="+Inf"}': "0+60x20",
    'doyen_transitions_total{cause="expired"}': "1x20",
    "doyen_overruns_total": "0x20",
    "doyen_store_errors_total": "1x20",
    "doyen_node_leader_known": "1x20",
    "doyen_node_disk_full": "0x20",
    "doyen_node_keyspace_alarm": "0x20",
    "doyen_node_disk_free_bytes": "50x20",
    "doyen_node_disk_bytes": "100x20",
    'doyen_node_fsync_seconds_bucket{le="0.1"}': "0+60x20",
    'doyen_node_fsync_seconds_bucket{le="+Inf"}': "0+60x20",
    "doyen_node_commit_index": "90000x20",
    "doyen_node_applied_index": "90000x20",
}
SITUATIONS: list[tuple[str, dict[str, str], dict[str, float]]] = [
    ("healthy", {}, {}),
    ("leaderless", {"doyen_election_led": "0x20"}, {"DoyenNoLeader": 0}),
    (
        "retired",
        {"doyen_election_led": "0x20", "doyen_election_wanted": "0x20"},
        {"DoyenNobodyStands": 0},
    ),
    ("silent", {"doyen_store_reachable": "0x20"}, {"DoyenStoreUnreachable": 0}),
    ("late", {"doyen_margin_seconds": "0.1x20"}, {"DoyenMarginLow": 0.1}),
    ("behind", {"doyen_node_applied_index": "70000x20"}, {"DoyenNodeBehind": 20000}),
    ("full", {"doyen_node_disk_full": "1x20"}, {"DoyenNodeDiskFull": 1}),
    ("filling", {"doyen_node_disk_free_bytes": "5x20"}, {"DoyenNodeDiskLow": 0.05}),
    ("headless", {"doyen_node_leader_known": "0x20"}, {"DoyenNodeWithoutLeader": 0}),
]
"""What one node of the second of two quorums shows, and the rules that this fires. Each rule is
also evaluated for the other nodes, which are healthy."""
NODES = [("q1", "a"), ("q1", "b"), ("q2", "c"), ("q2", "d")]


def _situation(values: dict[str, str], firing: dict[str, float]) -> dict[str, Any]:
    """A test for promtool: each rule on its own, and what it finds after ten minutes."""
    rules = (files("doyen.metrics") / "alerts.yaml").read_text()
    found = re.findall(r"- alert: (\w+)\n +expr: (.+)\n", rules)
    assert {name for name, _ in found} >= set(firing)
    series = []
    for job, instance in NODES:
        for metric, healthy in HEALTHY.items():
            name, brace, labels = metric.partition("{")
            own = f'job="{job}",instance="{instance}"'
            if "election" in name or "margin" in name:
                own += ',kind="elections",election="e",name="n"'
            shown = values.get(metric, healthy) if instance == "d" else healthy
            inside = f"{own},{labels}" if brace else f"{own}}}"
            series.append({"series": f"{name}{{{inside}", "values": shown})
    return {
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f"sum by (instance) ({expression})",
                        "eval_time": "10m",
                        "exp_samples": [{"labels": '{instance="d"}', "value": firing[name]}]
                        if name in firing
                        else [],
                    }
                    for name, expression in found
                    if "DoyenLeaderFlapping" not in name
                ],
            }
        ]
    }


def test_a_record_that_is_no_event_of_a_campaign_changes_nothing() -> None:
    meters, seen = SessionMeters(), list[Record]()
    meters.on_record.append(seen.append)
    meters(Record(PublishFailed(group="g", error="x"), 0.0, 0.0, "s", 1))
    assert len(seen) == 1
    assert meters.leading() == {}
