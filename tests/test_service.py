"""Reports to the service manager: the datagrams that systemd would receive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import servers
from candidates import DOYEN
from doyen.events.service import ServiceManager
from doyen.testing import run_virtual

PATIENCE_S = 30.0


class Manager:
    """The socket of a service manager, in the file system or in the abstract namespace."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.states: list[tuple[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(PATIENCE_S)

    def receive(self) -> list[tuple[str, str]]:
        """The states of the next datagram."""
        lines = self._socket.recv(4096).decode().split("\n")
        states = [(name, value) for name, _, value in (line.partition("=") for line in lines)]
        self.states += states
        return states

    def until(self, name: str, holds: Callable[[str], bool] = bool) -> str:
        """Wait for a state of this name."""
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            for found, value in self.receive():
                if found == name and holds(value):
                    return value
        raise AssertionError(f"no {name} among {self.states}")

    def pending(self) -> int:
        """Receive what has arrived, and return how many datagrams that was."""
        self._socket.setblocking(False)
        count = 0
        try:
            while True:
                self.receive()
                count += 1
        except BlockingIOError:
            return count
        finally:
            self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@doyen-test-{os.getpid()}" if request.param == "abstract" else f"{tmp_path}/notify"
    manager = Manager(name)
    yield manager
    manager.close()


def test_states_are_told_in_one_datagram(manager: Manager) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000", "HOME": "/"}
    told = ServiceManager.of_environment(environ)
    assert environ == {"HOME": "/"}  # the processes that are started from here do not report
    assert told.watchdog_s == 3.0
    told.tell(READY=1, STATUS="two\nlines")
    assert manager.receive() == [("READY", "1"), ("STATUS", "two lines")]


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_of_another_process_is_none_of_ours(
    variables: dict[str, str], watchdog_s: float | None
) -> None:
    assert ServiceManager.of_environment(variables).watchdog_s == watchdog_s


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative"])
def test_nobody_is_told_without_a_socket(address: str) -> None:
    ServiceManager(address).tell(READY=1)


def test_a_manager_that_is_gone_or_does_not_read_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = ServiceManager(f"{tmp_path}/gone")
    gone.tell(READY=1)
    gone.tell(WATCHDOG=1)
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager could not be notified of READY=1: [Errno 2] No such file or directory"
    ]
    manager = Manager(f"{tmp_path}/full")
    busy = ServiceManager(manager.address)

    def tell_often() -> None:
        for _ in range(5000):
            busy.tell(WATCHDOG=1)

    telling = threading.Thread(target=tell_often)
    telling.start()
    telling.join(PATIENCE_S)
    assert not telling.is_alive()
    manager.close()


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_a_watchdog_notices_that_the_work_stands_still(manager: Manager) -> None:
    """The loop of the reporter runs on, and what it asks no longer answers."""
    stuck = asyncio.Event()

    async def alive() -> None:
        if stuck.is_set():
            await asyncio.Event().wait()

    async def test() -> None:
        told = ServiceManager(manager.address, watchdog_s=2.0)
        keeping = asyncio.create_task(told.keep_watchdog(alive))
        await asyncio.sleep(4.5)
        assert manager.pending() == 5
        stuck.set()
        await asyncio.sleep(60.0)
        assert manager.pending() == 0
        keeping.cancel()
        await ServiceManager(manager.address).keep_watchdog()  # not watched: returns

    run_virtual(test())


@pytest.mark.parametrize("manager", ["abstract"], indirect=True)
def test_doyen_run_reports_its_state_and_keeps_the_watchdog(
    manager: Manager, tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "100000",
        "DOYEN_STORE": f"sqlite://{tmp_path}/doyen.db",
    }
    environ.pop("WATCHDOG_PID", None)
    script = "import os, signal; print(os.environ.get('NOTIFY_SOCKET'), flush=True); signal.pause()"
    process = subprocess.Popen(
        [*DOYEN, "run", "billing", "--", sys.executable, "-c", script],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        manager.until("STATUS", lambda text: text.startswith("connecting to sqlite:///"))
        assert manager.until("READY") == "1"
        status = manager.until("STATUS", lambda text: text.startswith("leading"))
        assert status.startswith("leading 'billing', token ")
        manager.until("WATCHDOG")
        manager.until("WATCHDOG")
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        process.terminate()
        manager.until("STOPPING")
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_doyen_serve_reports_its_state_and_keeps_the_watchdog(
    manager: Manager, tmp_path: Path
) -> None:
    port = servers.free_port()
    environ = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"}
    command = ["serve", "--found", "--id", "n1", "--peers", f"n1=:{port}"]
    process = subprocess.Popen(
        [*DOYEN, *command, "--data-dir", str(tmp_path / "n1")],
        env=environ,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert manager.until("READY") == "1"
        manager.until("STATUS", lambda text: text.startswith("node n1 is leading"))
        manager.until("WATCHDOG")
        process.terminate()
        manager.until("STOPPING")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
