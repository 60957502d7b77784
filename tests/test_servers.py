"""The servers that the stores are proved on: they start, answer, keep data, leave nothing.

Only the standard library talks to them here (`servers.wire`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import servers
from servers.janitor import family_of, is_running
from support import until_blocking

ENGINES: dict[str, Callable[[], servers.Server]] = {
    "etcd": servers.Etcd,
    "postgresql": servers.Postgres,
    "zookeeper": servers.ZooKeeper,
}
CLUSTERS: dict[str, Callable[[], servers.EtcdCluster | servers.ZooKeeperEnsemble]] = {
    "etcd": servers.EtcdCluster,
    "zookeeper": servers.ZooKeeperEnsemble,
}

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_cluster = pytest.mark.parametrize("engine", CLUSTERS)


@each_engine
def test_it_answers_and_its_data_outlive_a_kill(engine: str) -> None:
    with ENGINES[engine]() as server:
        assert server.url.startswith(f"{engine}://")
        server.put("mark", b"kept")
        server.kill()
        assert not server.alive
        with pytest.raises(ConnectionRefusedError):
            server.ping()
        server.start()
        assert server.get("mark") == b"kept"
        server.stop()
        server.start()
        assert server.get("mark") == b"kept"


@each_engine
def test_it_leaves_nothing(engine: str) -> None:
    with ENGINES[engine]() as server:
        family, folder = family_of(server.pid), server.folder
    assert not any(is_running(pid) for pid in family)
    assert not folder.exists()


@each_engine
def test_a_frozen_server_does_not_answer_and_goes_on_when_thawed(engine: str) -> None:
    with ENGINES[engine]() as server:
        server.freeze()
        with pytest.raises(TimeoutError):
            server.ping()
        server.thaw()
        server.await_ready()


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
    """Even what is frozen, and forks: PostgreSQL's processes do not end with the first of them."""
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
