"""The demonstration of the etcd document: three servers, a lease of 5 s, one leader."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Etcd
from test_examples import EXAMPLES, FAILING, LEADER, Servers, crash, interrupt, start_three


@pytest.fixture
def three(etcd: Etcd, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path, f"{etcd.url}/{tmp_path.name}")
    yield servers
    servers.stop()


def test_another_leads_after_an_exception_and_after_an_interrupt(
    three: Servers, tmp_path: Path
) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    first = start_three(three, str(program))
    (tmp_path / f"fail-{first}").touch()
    second = three.next_leader()
    assert second != first
    three.signal(second, signal.SIGINT)
    assert three.next_leader() not in (first, second)


@pytest.mark.chaos
def test_another_leads_after_a_crash(three: Servers) -> None:
    first = start_three(three, str(EXAMPLES / "leader_election.py"))
    three.hear_until(lambda: any("Lease refreshed" in line for _, line in three.said))
    crash(three, first)
    second = three.next_leader()
    interrupt(three, second)
    assert sorted([first, second, three.next_leader()]) == ["server1", "server2", "server3"]
    assert len(three.who_said(LEADER)) == 3
