"""`doyen doctor`: measurements, findings, and that nothing is left in the store."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import doyen
from candidates import Capture
from doyen import doctor
from doyen.cli import doctor as command
from doyen.cli import main
from doyen.doctor import (
    Examination,
    Latency,
    Operation,
    examine,
    judge_capabilities,
    judge_line,
    judge_times,
)
from doyen.election.options import SessionSettings
from doyen.errors import ConfigError, StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.model import Candidate, Finding, Leader, Lease, Line, Order, order_key
from doyen.stores.choice import without_password
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Capabilities, Context, Store
from doyen.testing import run_virtual
from doyen.testing.faults import Expired, Faults, FaultyStore, Late, LostCall, RefusedCall
from support import Place, virtual


def found(findings: Any, *levels: str) -> dict[str, str]:
    """Subjects and texts of the findings of these levels; by default of all levels except "ok"."""
    wanted = levels or ("note", "warning", "problem")
    return {each.subject: each.text for each in findings if each.level in wanted}


def latencies(**seconds: float) -> dict[Operation, Latency]:
    given = {"read": 0.001, "write": 0.001, "renewal": 0.001, **seconds}
    return {name: Latency((0.0, slowest)) for name, slowest in given.items()}  # type: ignore[misc]


# Findings


def test_good_times_on_a_quick_store() -> None:
    findings = [*judge_times(Timing(ttl_s=6), latencies(), requested_ttl_s=6)]
    assert found(findings, "ok") == {
        "request timeout": "1 s; the slowest call, a read, took 1 ms",
        "safety margin": "320 ms are left when a renewal is sent late and lost once;"
        " the slowest renewal took 1 ms",
    }
    assert not found(findings)


@pytest.mark.parametrize(
    ("slowest_s", "level"), [(0.5, None), (0.51, "warning"), (0.99, "warning"), (1.0, "problem")]
)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_request_timeout_is_held_against_the_slowest_call(
    operation: str, slowest_s: float, level: str | None
) -> None:
    findings = judge_times(Timing(ttl_s=6), latencies(**{operation: slowest_s}), requested_ttl_s=6)
    bad = [each for each in findings if each.level != "ok"]
    assert [each.level for each in bad] == ([level] if level else [])
    for each in bad:
        assert each.subject == "request timeout"
        assert f"a {operation}, took" in each.text
        ttl_s = int(each.remedy.split()[3])
        assert Timing(ttl_s=ttl_s).request_timeout_s >= 2 * slowest_s, "the remedy is one"


def test_a_margin_that_is_thin_against_the_latency() -> None:
    (finding,) = (
        each
        for each in judge_times(Timing(ttl_s=6), latencies(renewal=0.2), requested_ttl_s=6)
        if each.level != "ok"
    )
    assert (finding.level, finding.subject) == ("warning", "safety margin")


def test_times_that_are_short_in_themselves() -> None:
    short = Timing(ttl_s=1.5, stop_budget_s=0.01)
    assert set(found(judge_times(short, latencies(), requested_ttl_s=1.0), "warning")) == {
        "ttl",
        "stop budget",
    }
    granted = judge_times(Timing(ttl_s=6), {}, requested_ttl_s=5.5)
    assert found(granted) == {"ttl": "requested 5.5 s, the store grants 6 s"}


def test_what_an_engine_cannot_do_is_noted() -> None:
    weak = Capabilities(linearizable_reads=False, expiry_factor=2)
    notes = [each.text for each in judge_capabilities(weak)]
    assert [text.split(":")[0] for text in notes] == [
        "this store has no proof of death",
        "this store may keep a lease for up to 2 times its ttl",
        "reads of this store may be stale",
    ]
    assert not [*judge_capabilities(Capabilities(proof_of_death=True))]


LEADER = Leader("e", "a", 7)
A, B = Candidate("a", 0, leads=True), Candidate("b", 0, leads=False)


@pytest.mark.parametrize(
    ("line", "order", "expected"),
    [
        (Line(None), None, {"line": "note"}),
        (Line(None, (B,)), None, {"line": "warning"}),
        (Line(LEADER, (A,)), None, {"line": "warning"}),
        (Line(LEADER), None, {"line": "warning"}),
        (Line(LEADER, (A, B)), None, {"line": "ok"}),
        (Line(LEADER, (A, B)), Order(7, "ops"), {"line": "ok", "order": "note"}),
        (Line(LEADER, (A, B)), Order(6, "ops"), {"line": "ok"}),
        (Line(LEADER, (A, B, B)), None, {"line": "warning"}),
    ],
)
def test_the_state_of_an_election(
    line: Line, order: Order | None, expected: dict[str, str]
) -> None:
    assert {each.subject: each.level for each in judge_line(line, order)} == expected


def test_a_store_without_a_line_does_not_show_who_waits() -> None:
    (finding,) = judge_line(Line(LEADER), None, Capabilities(has_line=False))
    assert (finding.level, finding.text) == ("ok", "'a' leads; this store does not show who waits")


def test_failover_by_lease_and_by_proof_of_death() -> None:
    timing = Timing(ttl_s=6)
    by_proof = Examination(
        timing=timing,
        capabilities=Capabilities(proof_of_death=True, expiry_factor=2, notice_s=0.5),
        latencies={},
        line=None,
        findings=(),
    )
    by_lease = replace(by_proof, capabilities=Capabilities(expiry_factor=2, notice_s=0.5))
    requests_s = 0.5 + 2 * 1.0 + 1.5 * 0.25
    assert by_proof.worst_crash_failover_s == pytest.approx(requests_s + 0.0)
    assert by_proof.worst_failover_s == pytest.approx(12 * 1.005 + requests_s)
    assert by_lease.worst_crash_failover_s == by_lease.worst_failover_s


# Measuring, in virtual time


class Patient:
    """A store in virtual time, and the entries that are left in it."""

    def __init__(self, place: Place, faults: Faults) -> None:
        self.place = place
        context = Context(place.clock, lambda event: None)
        self.store: Store = FaultyStore(MemoryStore(place.server, context), faults)

    async def examine(self, **settings: Any) -> Examination:
        election = settings.pop("election", None)
        given = SessionSettings(url="memory://", **{"ttl_s": 6.0, **settings})
        try:
            return await examine(self.store, given, self.place.clock, election=election)
        finally:
            await self.store.close()
            assert not self.place.server._leases, "a lease was left behind"
            assert not self.place.server._entries, "something was left in the store"


@virtual
async def test_a_healthy_store(place: Place) -> None:
    result = await Patient(place, Faults()).examine()
    assert result.ok
    assert {name: len(each.samples_s) for name, each in result.latencies.items()} == {
        "read": doctor.ROUNDS,
        "write": doctor.ROUNDS,
        "renewal": doctor.ROUNDS,
    }
    assert set(found(result.findings, "warning", "problem")) == {"memory"}, "its own word"
    assert result.line is None


@virtual
async def test_all_runs_use_one_key_and_leave_the_record_of_another_alone(
    place: Place,
) -> None:
    """ZooKeeper keeps the znode above an entry."""
    keys: set[str] = set()
    for _ in range(2):
        patient = Patient(place, Faults())
        create = patient.store.create

        async def noted(key: str, value: bytes, lease: Lease, create: Any = create) -> Any:
            keys.add(key)
            return await create(key, value, lease)

        patient.store.create = noted  # type: ignore[method-assign]
        assert (await patient.examine()).ok
    (key,) = keys
    other = MemoryStore(place.server, Context(place.clock, lambda event: None))
    lease = await other.grant(60.0)
    held = (await other.create(key, b"", lease)).entry
    patient = Patient(place, Faults())
    given = SessionSettings(url="memory://", ttl_s=6.0)
    assert (await examine(patient.store, given, place.clock, election=None)).ok
    found = await other.get(key)
    assert found is not None
    assert found.version == held.version
    await patient.store.close()
    await other.revoke(lease)
    await other.close()


@virtual
async def test_one_slow_call_is_enough(place: Place) -> None:
    faults = Faults()
    faults.next("renew", Late(before_s=0.2))
    faults.next("get", Late(after_s=1.5))
    result = await Patient(place, faults).examine()
    assert result.latencies["renewal"].max_s == pytest.approx(0.2)
    assert result.latencies["read"].max_s == pytest.approx(1.5)
    assert result.latencies["write"].max_s == 0
    assert not result.ok
    assert set(found(result.findings, "problem")) == {"request timeout"}
    assert set(found(result.findings, "warning")) == {"safety margin", "memory"}


@virtual
async def test_a_slow_store_is_not_asked_for_ever(place: Place) -> None:
    faults = Faults()
    faults.next("create", *[Late(before_s=1.0)] * doctor.ROUNDS)
    began = place.clock.now()
    result = await Patient(place, faults).examine(ttl_s=60.0)
    assert place.clock.now() - began < doctor.MEASURE_FOR_S + 2
    assert 0 < len(result.latencies["write"].samples_s) < doctor.ROUNDS


@virtual
async def test_a_lease_that_ends_under_way_is_a_problem(place: Place) -> None:
    faults = Faults()
    faults.next("renew", Late(), Expired())
    result = await Patient(place, faults).examine()
    assert set(found(result.findings, "problem")) == {"lease"}
    assert len(result.latencies["renewal"].samples_s) == 1


@virtual
async def test_a_store_that_falls_silent_is_unavailable(place: Place) -> None:
    faults = Faults()
    faults.next("get", LostCall())
    with pytest.raises(StoreUnavailable, match="did not answer within 10 s"):
        await Patient(place, faults).examine(ttl_s=60.0)


@virtual
async def test_a_refusal_of_a_store_has_a_reason(place: Place) -> None:
    faults = Faults()
    faults.next("delete", RefusedCall())
    with pytest.raises(StoreUnavailable, match="refused"):
        await Patient(place, faults).examine()


@virtual
async def test_a_cancelled_examination_leaves_nothing(place: Place) -> None:
    faults = Faults()
    faults.next("get", Late(before_s=5.0))
    task = asyncio.ensure_future(Patient(place, faults).examine(ttl_s=60.0))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "settings", [{"ttl_s": 0.01}, {"ttl_s": 0.0}, {"ttl_s": 6.0, "stop_budget_s": 3.0}]
)
def test_times_that_no_session_is_given(settings: dict[str, float]) -> None:
    place = Place()

    async def main() -> None:
        with pytest.raises(ConfigError):
            await Patient(place, Faults()).examine(**settings)

    run_virtual(main(), clock=place.clock)


@virtual
async def test_an_election_is_examined(place: Place) -> None:
    session = await place.open()
    async with session.campaign("e", name="a"):
        context = Context(place.clock, lambda event: None)
        store = MemoryStore(place.server, context)
        lease = await store.grant(60)
        await store.create(order_key("e"), Order(2, "ops").encode(), lease)
        settings = SessionSettings(url="memory://")
        result = await examine(store, settings, place.clock, election="e")
        assert result.line is not None
        assert [each.name for each in result.line.candidates] == ["a"]
        assert "'a' leads and no candidate waits" in found(result.findings)["line"]
        await store.revoke(lease)
        await store.close()


class Coarse(MemoryStore):
    """Grants whole seconds, as etcd does, and returns a finding of its own."""

    capabilities = Capabilities(ttl_step_s=1.0)

    async def grant(self, ttl_s: float) -> Lease:
        return await super().grant(float(-(-ttl_s // 1)))

    async def diagnose(self) -> list[Finding]:
        return [Finding(level="problem", subject="coarse", text="is 3.4.1", remedy="3.5.11")]


def test_the_times_are_those_of_the_lease_that_was_granted() -> None:
    async def main() -> None:
        store = Coarse(MemoryServer(clock), Context(clock, lambda event: None))
        result = await examine(store, SessionSettings(url="", ttl_s=3.2), clock)
        await store.close()
        assert result.timing == Timing(ttl_s=4)
        assert found(result.findings)["ttl"] == "requested 3.2 s, the store grants 4 s"
        assert found(result.findings, "problem") == {"coarse": "is 3.4.1"}
        assert not result.ok

    clock = Place().clock
    run_virtual(main(), clock=clock)


def test_a_clock_that_halts_in_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    clock = SystemClock()

    async def main() -> Examination:
        store = MemoryStore(MemoryServer(clock), Context(clock, lambda event: None))
        try:
            return await examine(store, SessionSettings(url=""), clock)
        finally:
            await store.close()

    assert "no boot-time clock" in found(asyncio.run(main()).findings, "warning")["clock"]


# The command


def test_a_real_store_in_json(store: str, tmp_path: Path, capsys: Capture) -> None:
    options = ["--ttl", "60", "--stop-budget", "5", "--json"]
    assert main(["doctor", "billing", "--store", store, *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    timing = Timing(ttl_s=60, stop_budget_s=5)
    assert shown["ok"] is True
    assert (shown["store"], shown["election"]) == (store, "billing")
    assert shown["timing"]["margin_s"] == timing.margin_s
    assert shown["timing"]["stop_budget_s"] == 5
    assert shown["latency"]["renewal"]["count"] > 0
    assert 0 < shown["latency"]["write"]["p50_s"] <= shown["latency"]["write"]["max_s"]
    assert shown["failover"] == {
        "crashed_worst_s": timing.worst_failover_s(expiry_factor=0),
        "silent_worst_s": timing.worst_failover_s(),
        "proof_of_death": True,
    }
    assert {each["subject"] for each in shown["findings"]} >= {"sqlite", "disk", "sessions", "line"}
    assert not [*(tmp_path / "doyen.db.sessions").iterdir()], "a lease was left behind"
    with doyen.connect_blocking(store) as session:
        assert session.leader("billing") is None


def test_a_real_store_in_words(store: str, capsys: Capture) -> None:
    assert main(["doctor", "--store", store, "--ttl", "60"]) == 0
    out = capsys.readouterr().out
    for text in (f"store  {store}", "safety margin", "leader crashed", "SQLite", "no problems"):
        assert text in out
    assert max(map(len, out.replace(store, "").splitlines())) <= 80


def test_a_problem_is_printed_with_its_remedy_and_exits_with_1(
    store: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def troubled(*_: Any, **__: Any) -> Examination:
        return Examination(
            timing=Timing(ttl_s=6),
            capabilities=Capabilities(),
            latencies={},
            line=None,
            findings=(
                Finding(level="problem", subject="disk", text="is on fire", remedy="water"),
                Finding(level="warning", subject="air", text="is hot " * 20),
            ),
        )

    monkeypatch.setattr(command, "examine", troubled)
    assert main(["doctor", "--store", store]) == 1
    out = capsys.readouterr().out
    assert "problem   disk: is on fire\n          remedy: water\nwarning   air: is hot" in out
    assert out.endswith("1 problem, 1 warning\n")
    assert "when its lease has expired" in out
    assert max(map(len, out.replace(store, "").splitlines())) <= 80
    assert main(["doctor", "--store", store, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0] == {
        "level": "problem",
        "subject": "disk",
        "text": "is on fire",
        "remedy": "water",
    }


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--ttl", "5", "--stop-budget", "2"], 2, "safety margin of -0.900 s"),
        (["--ttl", "0.01"], 2, "below the minimum of this store"),
        (["--store", "sqlite:///proc/none/x.db"], 69, "/proc/none/x.db"),
        (["--store", "nothing://x"], 2, "no store for nothing://"),
    ],
)
def test_what_cannot_be_examined(
    store: str, capsys: Capture, options: list[str], code: int, words: str
) -> None:
    assert main(["doctor", "--store", store, *options]) == code
    assert words in capsys.readouterr().err


def test_a_store_that_does_not_open_is_given_up(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> Store:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(command, "open_store", never)
    monkeypatch.setattr(command, "OPEN_WITHIN_S", 0.01)
    assert main(["doctor", "--store", "postgresql://me:secret@db/x"]) == 69
    err = capsys.readouterr().err
    assert "postgresql://me:…@db/x did not answer" in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///x.db?a=b", "sqlite:///x.db?a=b"),
        ("redis://:pw@h:1/0", "redis://:…@h:1/0"),
        ("etcd://h1:1,h2:2", "etcd://h1:1,h2:2"),
        ("pg://me@h", "pg://me@h"),
        ("pg://me:p@w@h/x", "pg://me:…@h/x"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
