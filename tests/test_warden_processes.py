"""Wardens as processes: killed, frozen, started twice; holders that fork, close and freeze."""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import doyen
import servers
from doyen.audit import verify
from doyen.cli import main
from doyen.errors import LeaseGone, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, open_store
from fixtures import shared
from stamps import alive, until
from warded import Warded, warded

if not sys.platform.startswith("linux"):
    pytest.skip("wardens need pidfds, which only Linux has", allow_module_level=True)

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]
SOON_S = 8.0
"""On a loaded machine. The ttl is 30 s, so nothing that takes less has waited for it."""

server = shared(servers.QuorumNode)
Start = Callable[..., Warded]


@pytest.fixture
def start(server: servers.QuorumNode) -> Iterator[Start]:
    with warded(server.url) as start:
        yield start


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the host's warden."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DOYEN_WARDEN", str(folder / "warden"))
    return folder / "warden"


@contextmanager
def daemon(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The warden of the host."""
    process = subprocess.Popen([*DOYEN, "warden"], stderr=subprocess.DEVNULL)
    try:
        until(path.exists, "the warden listens")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)


def succeeds(start: Start, leader: Warded, end: Callable[[], None]) -> float:
    """End the leader while another is in line; how long until that one leads."""
    successor = start("successor")
    successor.ready()
    began = time.monotonic()
    end()
    successor.wait_for("elected")
    return time.monotonic() - began


def test_a_holder_that_dies_is_replaced_at_once_and_the_log_proves_it(
    start: Start, tmp_path: Path
) -> None:
    audit = str(tmp_path / "audit.jsonl")
    leader = start("leader", audit=audit)
    warden = leader.ready(leads=True)
    successor = start("successor", audit=audit)
    successor.ready()
    began = time.monotonic()
    leader.kill()
    successor.wait_for("elected")
    assert time.monotonic() - began < SOON_S
    until(lambda: not alive(warden), "the warden of a dead process ends")
    until(lambda: verify([audit]).terms == 2, "both terms are in the log")
    assert verify([audit]).ok
    # Without the warden's line, the terms overlap.
    lines = Path(audit).read_text().splitlines(keepends=True)
    Path(audit).write_text("".join(line for line in lines if '"leaseended"' not in line))
    assert not verify([audit]).ok


def test_the_warden_is_no_child_and_has_nothing_of_its_holder(start: Start) -> None:
    holder = start("leader", does="waits for children")
    warden = holder.ready(leads=True)
    holder.wait_for("childless")
    assert os.getsid(warden) not in (os.getsid(holder.process.pid), os.getsid(0))
    targets = []
    for each in os.listdir(f"/proc/{warden}/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/{warden}/fd/{each}"))
    assert {os.readlink(f"/proc/{warden}/fd/{number}") for number in range(3)} == {"/dev/null"}
    assert not [each for each in targets if each.startswith("pipe:")]
    command = Path(f"/proc/{warden}/cmdline").read_bytes()
    assert b"doyen://" not in command
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(warden, signum)
    assert succeeds(start, holder, holder.kill) < SOON_S


def test_a_session_that_is_closed_ends_its_warden(server: servers.QuorumNode) -> None:
    found: list[int] = []

    def hear(record: doyen.events.Record) -> None:
        found.extend([record.event.warden] if hasattr(record.event, "warden") else [])

    with (
        doyen.connect_blocking(server.url, ttl_s=30, warden="process", on_event=hear) as session,
        session.campaign("other"),
    ):
        until(lambda: found, "the warden is there")
    until(lambda: not alive(found[0]), "the warden ends")


def test_a_holder_goes_on_without_its_warden_and_starts_another(
    server: servers.QuorumNode,
) -> None:
    with warded(server.url, ttl_s=3.0) as start:
        leader = start("leader")
        os.kill(leader.ready(leads=True), signal.SIGKILL)
        leader.wait_for("unwarded")
        second = leader.wait_for("warded")["warden"]
        assert alive(second)
        assert not [each for each in leader.events if each["event"] in ("lost", "leaselost")]


def test_a_frozen_warden_acts_late_and_on_the_same_word(start: Start) -> None:
    leader = start("leader")
    warden = leader.ready(leads=True)
    os.kill(warden, signal.SIGSTOP)
    successor = start("successor")
    successor.ready()
    leader.kill()
    reuse(leader.process.pid)
    assert not successor.has("elected", within_s=0.5)
    os.kill(warden, signal.SIGCONT)
    successor.wait_for("elected")


def reuse(pid: int) -> None:
    """Start a process with this number, if that is permitted."""
    try:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    except OSError:
        return
    subprocess.run(["true"], check=True)


def test_a_forked_child_does_not_keep_the_lease(start: Start) -> None:
    leader = start("leader", does="forks")
    leader.ready(leads=True)
    child = leader.wait_for("forked")["child"]
    try:
        assert succeeds(start, leader, leader.kill) < SOON_S
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_closed_descriptors_are_no_death(server: servers.QuorumNode) -> None:
    """The holder lives and leads; when it dies, its leases are ended all the same."""
    with warded(server.url, ttl_s=4.0) as start:
        leader = start("leader", does="closes")
        leader.ready(leads=True)
        leader.wait_for("closed")
        successor = start("successor")
        successor.ready()
        assert not successor.has("elected", within_s=0.5)
        leader.kill()
        successor.wait_for("elected")


def test_an_engine_that_is_away_when_the_holder_dies() -> None:
    with servers.QuorumNode() as server, warded(server.url, election="e") as start:
        leader = start("leader")
        leader.ready(leads=True)
        server.kill()
        leader.kill()
        server.start()
        with doyen.connect_blocking(server.url, ttl_s=30) as session:
            until(lambda: session.leader("e") is None, "the lease has ended")


def test_only_the_leases_that_it_has_are_ended(start: Start) -> None:
    leader = start("leader", does="changes")
    leader.wait_for("elected")
    leader.ready(leads=True)
    other = start("other", does="changes")
    other.wait_for("elected")  # in the first campaign
    other.wait_for("waiting")
    leader.kill()
    other.wait_for("elected")
    assert not [each for each in other.events if each["event"] in ("lost", "leaselost")]


def test_a_warrant_of_another_cluster_is_void(server: servers.QuorumNode) -> None:
    """Every cluster counts its leases from 1."""

    async def main() -> None:
        context = Context(SystemClock(), lambda event: None)
        store = await open_store(server.url, context)
        lease = await store.grant(30.0)
        cluster, _, number = store.warrant(lease).partition(b" ")
        with pytest.raises(StoreUnusable, match="belongs to the cluster"):
            await store.end(b"another " + number)
        await store.renew(lease)
        assert cluster
        await store.end(cluster + b" " + number)
        with pytest.raises(LeaseGone):
            await store.renew(lease)
        await store.close()

    asyncio.run(main())


# The warden of a host


def test_sessions_find_the_warden_of_their_host(server: servers.QuorumNode, host: Path) -> None:
    with daemon(host) as process, warded(server.url, warden=None, settle_s=0.0) as start:
        leader = start("leader")
        assert leader.ready(leads=True) == process.pid
        assert succeeds(start, leader, leader.kill) < SOON_S


def test_a_warden_that_was_merely_found_lets_writes_settle(
    server: servers.QuorumNode, host: Path
) -> None:
    with daemon(host), warded(server.url, ttl_s=12.0, warden=None) as start:
        leader = start("leader")
        leader.ready(leads=True)
        assert 2.0 <= succeeds(start, leader, leader.kill) < 2.0 + SOON_S


def test_a_second_warden_is_refused_and_changes_nothing(host: Path) -> None:
    with daemon(host):
        second = subprocess.run([*DOYEN, "warden"], capture_output=True, text=True)
        assert second.returncode == 2
        assert "another warden serves" in second.stderr
        assert host.exists()


def test_the_log_of_a_warden_can_be_read_by_programs(
    server: servers.QuorumNode, host: Path
) -> None:
    with (
        subprocess.Popen(
            [*DOYEN, "warden", "--json", "--verbose"], stdout=subprocess.PIPE
        ) as process,
        warded(server.url, warden="host") as start,
    ):
        assert process.stdout is not None
        said = map(json.loads, process.stdout)
        assert next(said) == {"event": "warden_listens", "path": str(host), "pid": process.pid}
        leader = start("leader")
        leader.ready(leads=True)
        leader.kill()
        assert next(each for each in said if each["event"] == "lease_ended_by_warden")
        process.terminate()


@pytest.mark.parametrize("kind", ["system", "user"])
def test_a_unit_for_systemd_is_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warden", "--unit", kind]) == 0
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(capsys.readouterr().out)
    assert unit["Service"]["Type"] == "notify"
    assert unit["Service"]["ExecStart"].endswith(" warden")
    assert unit["Service"]["RuntimeDirectory"] == ("doyen/%i" if kind == "system" else "doyen")


def test_the_service_manager_is_notified(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(host.parent / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(30)
        with daemon(host):
            assert manager.recv(64) == b"READY=1"
        assert manager.recv(64) == b"STOPPING=1"


def test_sessions_register_again_with_a_warden_that_was_restarted(
    server: servers.QuorumNode, host: Path
) -> None:
    """What it knew is gone. The sessions that live have registered again, with what they hold."""
    with warded(server.url, ttl_s=4.0, warden="host") as start:
        with daemon(host) as first:
            leader = start("leader")
            leader.ready(leads=True)
            first.kill()
        leader.wait_for("unwarded")
        assert host.exists()  # left behind by a process that was killed
        host.unlink()
        with daemon(host) as second:
            assert leader.wait_for("warded")["warden"] == second.pid
            successor = start("successor")
            successor.ready()
            leader.kill()
            successor.wait_for("elected")


def test_without_a_warden_on_the_host_a_session_says_so_and_goes_on(
    server: servers.QuorumNode, host: Path
) -> None:
    with warded(server.url, warden="host") as start:
        leader = start("leader")
        leader.wait_for("elected")
        assert "doyen warden" in leader.wait_for("unwarded")["reason"]


# Frozen leaders


def test_a_frozen_leader_is_killed_and_replaced(start: Start) -> None:
    leader = start("leader", frozen_after_s=0.3)
    leader.ready(leads=True)

    def freeze() -> None:
        leader.process.send_signal(signal.SIGSTOP)

    assert succeeds(start, leader, freeze) < SOON_S
    assert leader.process.wait(10) == -signal.SIGKILL


def test_an_idle_leader_and_a_frozen_candidate_are_left_alone(start: Start) -> None:
    leader = start("leader", frozen_after_s=0.2)
    leader.ready(leads=True)
    candidate = start("candidate", frozen_after_s=0.2)
    candidate.ready()
    candidate.process.send_signal(signal.SIGSTOP)
    assert not leader.has("lost", within_s=1.0)
    assert leader.process.poll() is None
    assert candidate.process.poll() is None


# Supervised commands

STUBBORN = [
    sys.executable,
    "-S",
    "-c",
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " os.write(1, b'%d\\n' % os.getpid()); signal.pause()",
]


@contextmanager
def running(
    url: str, election: str, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`doyen run` with a command that ignores SIGTERM, and the process id of the command."""
    process = subprocess.Popen(
        [*DOYEN, "run", election, "--store", url, *options, "--", *STUBBORN],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_lease_of_a_supervised_command_ends_with_its_last_process(
    server: servers.QuorumNode,
) -> None:
    with (
        warded(server.url, election="supervised") as start,
        running(server.url, "supervised", "--ttl", "30", "--stop-budget", "3") as (run, command),
    ):
        successor = start("successor")
        successor.ready()
        began = time.monotonic()
        run.kill()
        successor.wait_for("elected")
        assert not alive(command)
        assert 2.0 < time.monotonic() - began < 2.1 + SOON_S  # the guard kills at 70 % of 3 s


def test_without_the_guards_word_the_lease_expires(server: servers.QuorumNode) -> None:
    with (
        warded(server.url, election="unguarded") as start,
        running(server.url, "unguarded", "--ttl", "4") as (run, command),
    ):
        guard = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
        successor = start("successor")
        successor.ready()
        os.kill(run.pid, signal.SIGSTOP)  # or it would end the command in the guard's place
        os.kill(guard, signal.SIGKILL)
        os.kill(run.pid, signal.SIGKILL)
        assert not successor.has("elected", within_s=1.0)
        successor.wait_for("elected")


def test_a_frozen_doyen_run_is_killed_with_its_command(server: servers.QuorumNode) -> None:
    with (
        warded(server.url, election="frozen") as start,
        running(
            server.url, "frozen", "--ttl", "30", "--stop-budget", "1", "--frozen-after", "0.3"
        ) as (run, command),
    ):
        successor = start("successor")
        successor.ready()
        began = time.monotonic()
        os.kill(run.pid, signal.SIGSTOP)
        successor.wait_for("elected")
        assert not alive(command)
        assert time.monotonic() - began < 1.0 + SOON_S
        assert run.wait(10) == -signal.SIGKILL
