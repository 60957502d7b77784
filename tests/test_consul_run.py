"""`doyen run` on Consul. `consul lock` has let two commands run: see docs/incidents.md."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers
from doyen.audit import verify
from fixtures import shared
from servers import wire
from stamps import now, until

if not sys.platform.startswith("linux"):
    pytest.skip("whole process trees can be seen on Linux only", allow_module_level=True)

from test_cli_run import Bench, ends

TTL_S = 2.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.end()


server = shared(lambda: servers.Consul(session_ttl_min="1s"))


@pytest.mark.parametrize(
    "fault",
    [
        "cut",
        pytest.param("half_open", marks=pytest.mark.chaos),
        pytest.param("refuse", marks=pytest.mark.chaos),
    ],
)
def test_a_command_is_dead_before_the_next_begins(
    server: servers.Consul, bench: Bench, fault: str
) -> None:
    """consul#9788: a client that had lost the lock killed its child too late. Here the leader is
    disconnected, and its command ignores the signal to end."""
    work, next_one = bench.stamps("away", "daemon"), bench.stay()
    logs = [bench.directory / f"{name}.log" for name in ("first", "second")]
    with servers.Proxy(server) as proxy:
        options = ("--ttl", str(TTL_S), "--store")
        bench.start(*options, proxy.url, "--audit", str(logs[0]), "--", *work.command)
        until(work.all_write, "the first tree runs")
        follower = bench.start(
            *options, server.url, "--audit", str(logs[1]), "--", *next_one.command
        )
        getattr(proxy, fault)()
        until(lambda: next_one.begun, "the second leads")
        assert not work.any_alive()
        assert work.last() < next_one.begun_at
        follower.send_signal(signal.SIGTERM)
        assert ends(follower)[0] == 128 + signal.SIGTERM
        report = verify([str(log) for log in logs])
        assert report.ok
        assert report.terms == 2


def test_a_command_ends_with_its_session(server: servers.Consul, bench: Bench) -> None:
    """consul#1843: the session had ended, the client knew, and the child ran on."""
    work = bench.stamps("away", "daemon")
    options = ("--ttl", "60", "--stop-budget", "0.5", "--once", "--store", server.url)
    leader = bench.start(*options, "--", *work.command)
    until(work.all_write, "the tree runs")
    gone_at = now()
    for session in wire.http_json(server.port, "GET", "/v1/session/list"):
        wire.http(server.port, "PUT", f"/v1/session/destroy/{session['ID']}")
    until(lambda: not work.any_alive(), "the tree is dead")
    assert work.last() - gone_at < 30.0, "it did not wait for its ttl of 60 s"
    assert ends(leader)[0] != 0
