"""Real servers as fixtures, and what a failing test shows of them.

The fixtures are shared by the whole run: a test that takes one leaves it as it found it. A test
that kills, freezes or fills a server starts one of its own (`with servers.Etcd() as etcd`); most
are up in half a second.

A server that cannot be had fails its tests in one line that says how to provide it;
`DOYEN_SKIP_STORES=etcd,zookeeper` leaves stores out.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator

import hypothesis
import pytest

import servers
import summary

# How long an example takes says nothing: other tests run beside it.
hypothesis.settings.register_profile("doyen", deadline=None)
hypothesis.settings.load_profile("doyen")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "chaos":
        config.pluginmanager.register(summary.Summary())
    _obey_signals()


def _obey_signals() -> None:
    """Whoever starts us in the background may have us ignore interrupts and hang-ups, and what we
    ignore the processes we start ignore too. Those that are to be interrupted must not."""
    for ignored, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, usual)


@pytest.fixture(scope="session")
def etcd() -> Iterator[servers.Etcd]:
    with servers.Etcd() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[servers.ZooKeeper]:
    with servers.ZooKeeper() as server:
        yield server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Postgres]:
    with servers.Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[servers.Redis]:
    with servers.Redis() as server:
        yield server


@pytest.fixture(scope="session")
def nats() -> Iterator[servers.Nats]:
    with servers.Nats() as server:
        yield server


@pytest.fixture(scope="session")
def mysql() -> Iterator[servers.MariaDB]:
    with servers.MariaDB() as server:
        yield server


@pytest.fixture(scope="session")
def consul() -> Iterator[servers.Consul]:
    with servers.Consul() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from _plainly()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _plainly()


def _plainly() -> Generator[None]:
    """Say what is missing in one line, without a traceback through our own code."""
    try:
        return (yield)
    except servers.Skipped as skipped:
        pytest.skip(str(skipped))
    except servers.Unavailable as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in servers.running():
            name = f"{server.engine} on port {server.port}"
            report.sections.append((f"end of the log of {name}", server.log_tail()))
    return report
