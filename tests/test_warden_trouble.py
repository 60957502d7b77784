"""What can go wrong around a warden, without processes: refusals, failures, threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from doyen.election.core import warding_of
from doyen.election.options import SessionSettings
from doyen.errors import ConfigError, StoreUnusable
from doyen.events import Event, Unwarded
from doyen.lease.clock import SystemClock, VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.lease.timing import Timing
from doyen.model import Lease
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Store, open_store
from doyen.supervise import Supervisor
from doyen.term import Term
from doyen.testing import run_virtual
from doyen.warden import child, client, daemon, server
from doyen.warden import table as table_module
from doyen.warden.child import ChildWarden
from doyen.warden.client import SessionWarden, hello_for
from doyen.warden.ending import KeptStores, LeaseEnder, Witness
from doyen.warden.holder import TICKS, FrozenWatch
from doyen.warden.server import FINISH_S, SUCCESSOR_S, Warden
from doyen.warden.table import TABLE_BYTES, LeaseTable, TableState, WardedLease, read_state
from doyen.warden.watched import WatchedSession
from doyen.warden.wire import Hello, Refused, Welcome, encode_reply

# Supervised runs


class RunningTerm:
    """A term of which only the beginning and the end of runs is of interest."""

    token, valid_until, stop_budget_s = 1, 1e12, 1.0

    def __init__(self) -> None:
        self.runs: set[int] = set()

    def _on_renewal(self, listener: Callable[[float], None]) -> None: ...

    def on_end(self, listener: Callable[[], None]) -> None: ...

    def _proof(self) -> tuple[int, ...]:
        return ()

    def _run_begins(self) -> int:
        self.runs.add(1)
        return 1

    def _run_ended(self, run: int) -> None:
        self.runs.discard(run)


class GuardlessSupervisor(Supervisor):
    def _start_guard(self) -> None: ...


def test_a_run_that_is_dropped_with_its_loop_has_not_ended() -> None:
    """A second Ctrl-C ends the loop while the guard still stops the command. The process dies
    then, and its lease must not be ended before the guard's word."""

    async def main() -> None:
        term = RunningTerm()
        run = GuardlessSupervisor(["true"]).run(cast(Term, term))
        run.send(None)
        run.close()
        assert term.runs == {1}

    asyncio.run(main())


class Interrupted:
    """The runs of a table. Who has read them lets another thread read them too, if that can."""

    def __init__(self, runs: struct.Struct) -> None:
        self._runs = runs
        self._both = threading.Barrier(2)

    def unpack_from(self, buffer: memoryview, at: int) -> tuple[int, ...]:
        found = self._runs.unpack_from(buffer, at)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.02)
        return found


def test_supervisors_of_several_threads_have_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "_RUNS", Interrupted(table_module._RUNS))
    memory = bytearray(TABLE_BYTES)
    table = LeaseTable(memoryview(memory))
    with ThreadPoolExecutor(8) as threads:
        runs = [*threads.map(lambda _: table.run_begins(), range(8))]
        state = read_state(lambda at, count: bytes(memory[at : at + count]))
        assert state is not None
        assert state.runs == set(runs) == set(range(1, 9))
        [*threads.map(table.run_ended, runs)]
    state = read_state(lambda at, count: bytes(memory[at : at + count]))
    assert state is not None
    assert not state.runs


# Finding a warden


class FakeChild:
    """A child warden that is there and says nothing."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.linked = False

    def link(self) -> socket.socket:
        self.linked = True
        return self.ours

    def release(self) -> None: ...


def test_a_host_warden_that_refuses_is_replaced_by_one_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`doyen run` always has a warden, also with a password in the environment that the host's
    does not have."""
    fake = FakeChild()
    ours, host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    monkeypatch.setattr(client, "socket_path", lambda: tmp_path / "warden")
    monkeypatch.setattr(client, "connected", lambda path: ours)
    monkeypatch.setattr(ChildWarden, "acquire", lambda: fake)

    async def main() -> None:
        warden = SessionWarden(Hello(session="s", url="x://"), "auto", lambda event: None)
        warden.begin()
        assert not fake.linked
        host.send(encode_reply(Refused("the environments differ")))
        for _ in range(5):
            await asyncio.sleep(0)
        warden.renewed()
        assert fake.linked
        warden.close()

    with host, fake.theirs:
        asyncio.run(main())


@pytest.mark.parametrize(("lived_s", "pause_s"), [(1.0, 60.0), (100.0, 1.0)])
def test_a_warden_that_has_served_for_long_is_replaced_at_once(
    lived_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses grow only while one after the other does not live."""
    children: list[FakeChild] = []

    def acquire() -> FakeChild:
        children.append(FakeChild())
        return children[-1]

    monkeypatch.setattr(ChildWarden, "acquire", acquire)

    async def main() -> None:
        warden = SessionWarden(Hello(session="s", url="x://"), "process", lambda event: None)
        now = 1000.0
        monkeypatch.setattr(warden._loop, "time", lambda: now)
        warden.begin()
        for _ in range(8):
            child = children[-1]
            child.theirs.send(encode_reply(Welcome(1)))
            warden._receive()
            now += lived_s
            child.theirs.close()
            warden._receive()
            now += 60.0
            warden.renewed()
            assert len(children) > 1
        assert warden._restart_at - now == pause_s
        warden.close()

    asyncio.run(main())
    for each in children:
        each.theirs.close()


class Closing(MemoryStore):
    """Doyen's thread closes the descriptors of a lease, and another file gets their number, just
    when they are being copied."""

    def __init__(self, server: MemoryServer, clock: VirtualClock) -> None:
        super().__init__(server, Context(clock, lambda event: None))
        self.descriptor = os.open("/dev/null", os.O_RDONLY)
        self.asked = 0

    def proof(self, lease: Lease) -> tuple[int, ...]:
        self.asked += 1
        if self.asked == 2:
            os.close(self.descriptor)
            self.descriptor = -1
        return () if self.descriptor < 0 else (self.descriptor,)


def test_descriptors_that_are_closed_meanwhile_are_not_passed_on() -> None:
    clock = VirtualClock()

    async def main() -> None:
        store = Closing(MemoryServer(clock), clock)
        runtime = InlineRuntime(clock)
        settings = SessionSettings(url="memory://", ttl_s=5.0)
        async with (
            Session(settings, runtime, store) as session,
            session.campaign("e") as term,
        ):
            open_before = set(os.listdir("/proc/self/fd"))
            assert term._proof() == ()
            assert set(os.listdir("/proc/self/fd")) <= open_before
            assert store.asked >= 3

    run_virtual(main, clock=clock)


def test_without_a_working_directory_a_session_has_a_warden_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment that removes the directory of the version before."""

    def removed() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", removed)
    hello = hello_for(
        session="s",
        url="etcd://h?ca=ca.pem",
        audit=f"{tmp_path}/audit",
        settle_s=0.0,
        frozen_after_s=None,
        request_timeout_s=1.0,
    )
    assert hello.url == "etcd://h?ca=%2Fca.pem"
    assert hello.audit == f"{tmp_path}/audit"


def test_entries_of_the_path_that_python_ignores_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])

    def start(control: socket.socket, owner: int) -> None:
        control.close()
        os.close(owner)

    monkeypatch.setattr(child, "_start", start)
    warden = ChildWarden()
    warden._control.close()


def settings_of(**options: float) -> SessionSettings:
    return SessionSettings("etcd://h", ttl_s=5.0, **options)  # type: ignore[arg-type]


def forms(settings: SessionSettings) -> str:
    async def main() -> str:
        limits = MemoryStore(MemoryServer(clock), Context(clock, lambda event: None)).capabilities
        shared = replace(limits, one_process=False)
        warding = warding_of(settings, shared, Timing(ttl_s=5.0), "s", lambda event: None)
        assert isinstance(warding, SessionWarden)
        return warding._form

    clock = VirtualClock()
    return asyncio.run(main())


def test_who_asks_for_a_frozen_process_to_be_killed_has_a_warden_for_it() -> None:
    assert forms(settings_of()) == "found"
    assert forms(settings_of(frozen_after_s=1.0)) == "auto"


def test_where_there_can_be_no_warden_nothing_is_reported_unless_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")

    async def main() -> None:
        for form, reported in (("found", 0), ("auto", 1)):
            seen: list[Event] = []
            warden = SessionWarden(Hello(session="s", url="x://"), form, seen.append)  # type: ignore[arg-type]
            warden.begin()
            assert [type(each) for each in seen] == [Unwarded] * reported

    asyncio.run(main())


# Frozen holders


def silent(answered: int = 0) -> TableState:
    return TableState(answered, 1, False, frozenset(), 0)


def test_a_late_tick_is_not_counted() -> None:
    """After a suspend the holder has the whole time to answer."""
    watch = FrozenWatch(1.0)
    watch.tick(0.0, silent())
    assert watch.tick(100.0, silent()) is None
    said = [watch.tick(100.0 + n * watch.tick_s, silent()) for n in range(1, TICKS + 1)]
    assert said == [None] * (TICKS - 1) + ["kill"]


def test_an_answer_to_another_warden_counts() -> None:
    watch = FrozenWatch(1.0)
    watch.tick(0.0, silent())
    assert all(watch.tick(n * watch.tick_s, silent(answered=n + 1)) != "kill" for n in range(1, 20))


class Deaf:
    """A holder to which nothing can be sent, because the kernel has no memory for it."""

    killed = False

    def attach(self, on_message: Callable[[], None], on_death: Callable[[], None]) -> None: ...

    def receive(self) -> bytes | None:
        return None

    def send(self, message: bytes) -> bool:
        return False

    def read(self, at: int, count: int) -> bytes:
        memory = bytearray(TABLE_BYTES)
        LeaseTable(memoryview(memory)).bodies(1)
        return bytes(memory[at : at + count])

    def kill(self) -> str:
        self.killed = True
        return ""

    def detach(self) -> None: ...

    def close(self) -> None: ...


def test_who_was_not_asked_is_not_killed() -> None:
    async def main() -> None:
        holder = Deaf()
        hello = Hello(session="s", url="memory://", frozen_after_s=1.0)
        session = WatchedSession(hello, holder, lambda session, leases: None)
        session.start()
        await asyncio.sleep(30)
        session.abandon()
        assert not holder.killed

    run_virtual(main)


# The warden itself


def test_a_warden_without_descriptors_rests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Exhausted(socket.socket):
        attempts = 0

        def accept(self) -> tuple[socket.socket, object]:
            self.attempts += 1
            raise OSError(24, "Too many open files")

    async def main(listener: Exhausted) -> None:
        warden = Warden()
        warden.listen(listener)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
            holder.connect(f"{tmp_path}/w")
            for _ in range(50):
                await asyncio.sleep(0)
        assert listener.attempts == 1
        await warden.stop(0.0)

    with Exhausted(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{tmp_path}/w")
        asyncio.run(main(listener))


def test_a_file_in_the_place_of_the_socket_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "notes").write_text("mine")
    monkeypatch.setenv("DOYEN_WARDEN", f"{tmp_path}/notes")
    with pytest.raises(ConfigError, match="not a socket"), daemon._listening():
        pass
    assert (tmp_path / "notes").read_text() == "mine"


class Hanging(MemoryStore):
    async def end(self, warrant: bytes) -> None:
        await asyncio.sleep(1e9)


def test_a_warden_that_is_stopped_while_it_ends_leases_fails_in_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()

    async def main() -> None:
        store = Hanging(MemoryServer(clock), Context(clock, lambda event: None))

        async def opener(_: str) -> Store:
            return store

        warden = Warden(opener, clock)
        session = warden.watch(Hello(session="s", url="memory://"), Deaf())
        warden._over(session, [WardedLease("1", 5.0, b"1")])
        await asyncio.sleep(0.1)
        await warden.stop(1.0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, "doyen.warden"):
        run_virtual(main, clock=clock)
    assert not caplog.records


def test_a_service_that_restarts_does_not_wait_long_for_a_store_that_hangs() -> None:
    """A service manager sends SIGTERM to all processes of the service. As long as the holder lives
    its warden stays; after that, the restart waits for the warden."""
    clock = VirtualClock()

    async def main() -> float:
        store = Hanging(MemoryServer(clock), Context(clock, lambda event: None))

        async def opener(_: str) -> Store:
            return store

        warden = Warden(opener, clock)
        session = warden.watch(Hello(session="s", url="memory://"), Deaf())
        running = asyncio.create_task(warden.run())
        warden.hurry()
        await asyncio.sleep(3600)
        assert not running.done()
        died_at = asyncio.get_running_loop().time()
        warden._over(session, [WardedLease("1", 5.0, b"1")])
        await running
        return asyncio.get_running_loop().time() - died_at

    assert 0.0 < run_virtual(main, clock=clock) <= FINISH_S


class Taken(MemoryStore):
    """A store that notes what is done with it, and when."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(MemoryServer(clock), Context(clock, lambda event: None))
        self._now = clock.now
        self.ended_at = self.closed_at = -1.0

    async def end(self, warrant: bytes) -> None:
        self.ended_at = self._now()

    async def close(self) -> None:
        self.closed_at = self._now()


def test_a_lease_is_ended_at_once_and_the_store_is_closed_when_the_successor_leads() -> None:
    """A turn of the loop costs 50 µs. To close a connection and to exit cost the successor's
    processors several ms."""
    clock = VirtualClock()

    async def main() -> None:
        store = Taken(clock)

        async def opener(_: str) -> Store:
            return store

        warden = Warden(opener, clock)
        session = warden.watch(Hello(session="s", url="memory://"), Deaf())
        running = asyncio.create_task(warden.run())
        await asyncio.sleep(1)
        died_at = clock.now()
        warden._over(session, [WardedLease("1", 5.0, b"1")])
        await asyncio.sleep(0)
        assert store.ended_at == died_at
        await running
        assert store.closed_at - died_at == pytest.approx(SUCCESSOR_S)

    run_virtual(main, clock=clock)


def test_what_writes_an_audit_log_is_loaded_before_a_holder_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To import it takes 20 ms."""
    for name in [name for name in sys.modules if name.startswith("doyen.audit")]:
        monkeypatch.delitem(sys.modules, name)

    async def main() -> None:
        clock = SystemClock()
        store = MemoryStore(MemoryServer(clock), Context(clock, lambda event: None))

        async def opener(_: str) -> Store:
            return store

        warden = Warden(opener)
        warden.watch(Hello(session="s", url="memory://", audit="audit.jsonl"), Deaf())
        await asyncio.get_running_loop().shutdown_default_executor()
        assert "doyen.audit.log" in sys.modules
        await warden.stop(0.0)

    asyncio.run(main())


def test_sessions_in_several_directories_share_a_warden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own working directory stays as it is: another session may be using it."""
    monkeypatch.setattr(server, "_rehearse", lambda store: asyncio.sleep(0))
    here = os.getcwd()
    url = f"sqlite://{tmp_path}/doyen.db"

    async def main() -> None:
        await (await open_store(url, Context(SystemClock(), lambda event: None))).close()
        store = await Warden()._open_store(url)
        await store.close()

    asyncio.run(main())
    assert os.getcwd() == here
    hello = hello_for(
        session="s",
        url="sqlite:a%20b.db?token_floor=1",
        audit=None,
        settle_s=0.0,
        frozen_after_s=None,
        request_timeout_s=1.0,
    )
    assert hello.url == f"sqlite://{here}/a%20b.db?token_floor=1"


def test_a_store_that_could_not_be_opened_is_opened_when_it_is_needed() -> None:
    """What was wrong when the session registered may long be right when its holder dies."""
    clock = VirtualClock()

    async def main() -> bool:
        store = MemoryStore(MemoryServer(clock), Context(clock, lambda event: None))
        lease = await store.grant(1e9)
        broken = True

        async def opener(_: str) -> Store:
            if broken:
                raise StoreUnusable("its tables are being migrated")
            return store

        stores = KeptStores(opener)
        hello = Hello(session="s", url="memory://")
        stores.acquire(hello.url)
        await asyncio.sleep(3600)
        broken = False
        ender = LeaseEnder(stores, Witness(clock, "warden"), clock, 1e6)
        await ender.end(hello, [WardedLease(lease.id, 5.0, store.warrant(lease))])
        return lease.id in store._server._leases

    assert not run_virtual(main, clock=clock)
