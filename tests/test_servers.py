"""The servers on which stores are tested: they start, answer, keep data, and leave nothing behind.

They are accessed with the standard library only (`servers.wire`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import servers
from servers import wire
from servers.janitor import family_of, is_running
from support import until_blocking

ENGINES: dict[str, Callable[[], servers.Server]] = {
    "etcd": servers.Etcd,
    "zookeeper": servers.ZooKeeper,
    "postgresql": servers.Postgres,
    "consul": servers.Consul,
    "mysql": servers.MariaDB,
    "redis": servers.Redis,
    "nats": servers.Nats,
}
CLUSTERS: dict[str, Callable[[], servers.EtcdCluster | servers.ZooKeeperEnsemble]] = {
    "etcd": servers.EtcdCluster,
    "zookeeper": servers.ZooKeeperEnsemble,
}

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_cluster = pytest.mark.parametrize("engine", CLUSTERS)


@pytest.mark.chaos
@each_engine
def test_it_keeps_its_data_across_faults_and_leaves_nothing(engine: str) -> None:
    with ENGINES[engine]() as server:
        assert server.url.startswith(f"{engine}://")
        folder = server.folder
        server.put("mark", b"kept")

        server.kill()
        assert not server.alive
        with pytest.raises(ConnectionRefusedError):
            server.ping()
        server.start()
        assert server.get("mark") == b"kept"

        server.freeze()
        with pytest.raises(TimeoutError):
            server.ping()
        server.thaw()
        server.await_ready()
        assert server.get("mark") == b"kept"

        server.stop()
        assert not server.alive
        server.start()
        assert server.get("mark") == b"kept"
        family = family_of(server.pid)
    assert not any(is_running(pid) for pid in family)
    assert not folder.exists()
    assert server not in servers.running()


@pytest.mark.chaos
@each_cluster
def test_a_cluster_replaces_a_leader_that_is_killed_or_frozen(engine: str) -> None:
    with CLUSTERS[engine]() as cluster:
        first = cluster.leader()
        first.kill()
        second = cluster.leader()
        assert second is not first
        first.start()
        second.freeze()
        third = cluster.leader()
        assert third is not second
        second.thaw()
        second.await_ready()
        assert len(cluster.followers()) == 2


def test_the_janitor_cleans_up_after_a_killed_process() -> None:
    """Even frozen processes and descendants: those of PostgreSQL do not end with their parent."""
    code = (
        "import servers, signal\n"
        "with servers.Postgres() as server:\n"
        "    server.freeze()\n"
        "    print(server.pid, server.folder, flush=True)\n"
        "    signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().split()
        family = family_of(int(pid))
        assert len(family) > 1
        process.send_signal(signal.SIGKILL)
    until_blocking(lambda: not any(is_running(pid) for pid in family))
    until_blocking(lambda: not Path(folder).exists())


def test_the_janitor_finds_processes_whose_parent_has_ended() -> None:
    """A client of a trial that was killed, frozen and in a session of its own."""
    code = (
        "import os, signal, subprocess\n"
        "from servers.janitor import janitor\n"
        "janitor.hold_descendants()\n"
        "command = ['sh', '-c', 'sleep 1000 >/dev/null & echo $!']\n"
        "orphan = int(subprocess.check_output(command, start_new_session=True))\n"
        "os.kill(orphan, signal.SIGSTOP)\n"
        "print(orphan, flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert is_running(orphan)
        assert orphan not in family_of(process.pid)
        process.kill()
    until_blocking(lambda: not is_running(orphan))


@pytest.mark.chaos
def test_a_sentinel_makes_a_replica_the_master() -> None:
    with (
        servers.Redis() as master,
        servers.RedisReplica(master) as replica,
        servers.RedisSentinel(master) as sentinel,
    ):
        sentinel.put("mark", b"kept")
        until_blocking(lambda: replica.get("mark") == b"kept")
        master.kill()
        until_blocking(lambda: sentinel.master_port() == replica.port, within_s=60)
        assert sentinel.get("mark") == b"kept"


CLOCKS: dict[str, tuple[Callable[[], servers.Server], Callable[[Any], Any]]] = {
    "postgresql": (
        lambda: servers.Postgres(own_clock=True),
        lambda server: server.query("SELECT extract(epoch FROM clock_timestamp())")[0][0],
    ),
    "mysql": (
        lambda: servers.MariaDB(own_clock=True),
        lambda server: server.query("SELECT unix_timestamp(now(6))")[0][0],
    ),
    "redis": (
        lambda: servers.Redis(own_clock=True),
        lambda server: wire.redis_command(
            server.port, "EVAL", "return tonumber(redis.call('TIME')[1])", "0"
        ),
    ),
}


@pytest.mark.parametrize("engine", CLOCKS)
def test_a_clock_is_stepped_forward_and_back(engine: str) -> None:
    start, read = CLOCKS[engine]
    with start() as server:
        assert float(read(server)) == pytest.approx(time.time(), abs=30)
        server.step_clock(3600)
        assert float(read(server)) == pytest.approx(time.time() + 3600, abs=30)
        server.step_clock(-7200)
        assert float(read(server)) == pytest.approx(time.time() - 3600, abs=30)


def test_concurrent_processes_choose_different_ports() -> None:
    """The port of a server that is being restarted must not be taken by another process."""
    code = "import servers; print(*(servers.free_port() for _ in range(150)), flush=True); input()"
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    cwd=Path(__file__).parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(4)
        ]
        chosen = [each.stdout.readline().split() for each in processes if each.stdout is not None]
    assert all(len(ports) == 150 for ports in chosen)
    assert len({port for ports in chosen for port in ports}) == 600


def test_a_port_that_is_in_use_is_replaced() -> None:
    with servers.Redis() as first:
        second = servers.Redis()
        second.ports = first.ports
        with second:
            assert second.port != first.port
            second.ping()


def test_a_server_that_does_not_start_shows_its_log() -> None:
    redis = servers.Redis(no_such_setting="1")
    with pytest.raises(servers.ServerFailed, match="Bad directive"), redis:
        pass
    assert not redis.folder.exists()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DOYEN_SKIP_STORES", "etcd, nats", "1 skipped"),
        ("DOYEN_ETCD_BIN", "/nowhere/etcd", "/nowhere/etcd: there is no such file"),
    ],
)
def test_a_missing_server_is_reported_in_one_line(variable: str, value: str, message: str) -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here)]
    result = subprocess.run(
        [*command, "-m", "chaos", "-k", "test_it_keeps and etcd"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
    )
    assert result.returncode == (0 if "SKIP" in variable else 1)
    assert message in result.stdout
    assert "Traceback" not in result.stdout
    assert "def " not in result.stdout
