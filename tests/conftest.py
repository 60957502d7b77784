"""Fixtures for real servers. Reports of failing tests include the logs of running servers.

The fixtures are shared by the whole run, so a test must leave a server as it found it. A test that
kills, freezes or fills a server starts its own (`with servers.Etcd() as etcd`); most servers start
in half a second.

If a server is not available, its tests fail with one line that says how to provide it.
`DOYEN_SKIP_STORES=etcd,zookeeper` skips stores.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import doyen
import doyen.stores.etcd  # turns off gRPC's handlers of forks, before a test imports grpc
import servers
import summary
from doyen.lab.processes import failed_callbacks
from fixtures import shared
from servers.janitor import janitor

# The duration of an example means nothing, because other tests run at the same time.
hypothesis.settings.register_profile("doyen", deadline=None)
hypothesis.settings.load_profile("doyen")


WITHIN_S = 120.0
LOGS = (True, False, logging.NOTSET, logging.NOTSET)
"""Whether doyen's logger passes records on and is disabled, its level, and what is disabled."""
SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGTSTP: signal.SIG_DFL,
    signal.SIGCONT: signal.SIG_DFL,
}
"""Signals that tests send to child processes, and how they are handled before any test."""
LONG = (
    "test_lab_quorum",
    "test_quorum_history",
    "test_quorum_elections",
    "test_engines",
    "test_orders_processes",
    "test_node_processes",
    "test_sqlite_processes",
    "test_cli_up",
    "test_web_pages",
    "test_cli_run",
    "test_docs_stories",
    "test_docs",
    "test_bench_smoke",
    "test_lab_mutants",
    "test_swarm",
    "test_orders_swarm",
    "test_zookeeper_failures",
    "test_quorum_upgrade",
    "test_quorum_siege",
    "test_fencing_servers",
    "test_fencing_paused",
    "test_forward_processes",
    "test_postgresql_failover",
    "test_redis_cluster",
    "test_node",
    "test_scenarios",
    "test_incidents",
    "test_examples",
    "test_supervise",
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a local store that exists, so that it can be queried."""
    url = f"sqlite://{tmp_path}/doyen.db"
    doyen.connect_blocking(url).open().close()
    return url


@pytest.fixture(autouse=True)
def callback_failures() -> Iterator[list[str]]:
    """The exceptions that nodes in this process have caught and logged. A test that causes some
    clears the list; otherwise it fails, since nodes go on after these."""
    failures: list[str] = []
    with failed_callbacks(failures.append):
        yield failures
    assert not failures, "a node has caught an exception of its own code"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "chaos":
        config.pluginmanager.register(summary.Summary())
    _restore_signals()
    janitor.hold_descendants()
    # Tests start hundreds of processes, each of which would compile doyen again, and the next run
    # would rewrite the assertions of all tests again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that no worker is left alone with one at the end."""
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONG)))


def _restore_signals() -> list[signal.Signals]:
    """Restore the default handling of signals that are ignored, as they may be in a background job.
    Child processes inherit ignored signals, and tests send these signals to them."""
    ignored = [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, SIGNALS[each])
    return ignored


@pytest.fixture
def signals() -> Iterator[None]:
    """For a test that calls `doyen run` in its own process: it ignores signals when it ends."""
    yield
    _restore_signals()


etcd = shared(servers.Etcd, "session")
zookeeper = shared(servers.ZooKeeper, "session")
postgresql = shared(servers.Postgres, "session")
redis = shared(servers.Redis, "session")
nats = shared(servers.Nats, "session")
mysql = shared(servers.MariaDB, "session")
consul = shared(servers.Consul, "session")
quorum = shared(servers.QuorumCluster, "session")


@pytest.fixture(scope="session")
def go_program() -> Path:
    """The candidate in Go. Like all fixtures, it is made before the time of a test begins."""
    from foreign import go_candidate

    return go_candidate()


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> None:
    """The programs of others that take part on the engine of a test."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is not None and str(parameters.params.get("engine")).endswith(" go"):
        request.getfixturevalue("go_program")


@pytest.fixture(scope="session")
def etcd3_program() -> Path:
    """The interpreter of candidates and observers with python-etcd3."""
    from mixed_line import etcd3_interpreter

    return etcd3_interpreter()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on a loop of its own. It fails if it takes too long,
    or if the loop reports an exception that no code has handled."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    unhandled: list[dict[str, Any]] = []

    def report(_: asyncio.AbstractEventLoop, error: dict[str, Any]) -> None:
        # gRPC has one poller for all loops of a process, and it wakes all of them: a loop whose
        # event another one has taken, or whose call belongs to a loop that is closed by now, gets
        # an error that concerns nobody (grpc/grpc#25364).
        if "PollerCompletionQueue._handle_events" not in error["message"]:
            unhandled.append(error)

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(report)
        async with asyncio.timeout(WITHIN_S):
            await pyfuncitem.obj(**given)

    asyncio.run(bounded())
    assert not unhandled
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from _one_line_errors()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _one_line_errors()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test that turns off doyen's logging, or signals to child processes, for the tests that
    follow it."""
    yield
    logger = logging.getLogger("doyen")
    logs = (logger.propagate, logger.disabled, logger.level, logging.root.manager.disable)
    logger.propagate, logger.disabled = True, False
    logger.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    ignored = _restore_signals()
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert logs == LOGS, "the test left doyen's logging changed"
    assert not ignored, f"the test left {ignored} ignored"
    assert not blocked, f"the test left {blocked} blocked"


def _one_line_errors() -> Generator[None]:
    """Report a missing server in one line, without a traceback."""
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
