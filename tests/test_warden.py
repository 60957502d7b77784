"""The parts of a warden without processes: table, decisions, retries, trust."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen import LeadershipLost, Session, connect_blocking
from doyen.audit import verify_lines
from doyen.audit.evidence import read
from doyen.election.options import SessionSettings
from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.events import Record, Unwarded
from doyen.lease.clock import VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Store, open_store
from doyen.testing import run_virtual
from doyen.warden import diagnosis, location
from doyen.warden.child import interpreter
from doyen.warden.client import portable_url
from doyen.warden.diagnosis import Surroundings, findings
from doyen.warden.ending import ANSWERED_TTLS, KeptStores, LeaseEnder, Witness
from doyen.warden.holder import TICKS, FrozenWatch, HolderWatch, Ping, Verdict
from doyen.warden.kernel import must_not_be_killed, receive_despite_reset
from doyen.warden.table import (
    TABLE_BYTES,
    LeaseTable,
    TableFull,
    TableState,
    WardedLease,
    read_leases,
    read_state,
)
from doyen.warden.warding import NoWarden
from doyen.warden.wire import (
    BYE,
    Hello,
    Refused,
    encode_number,
    holder_pidfd,
    own_pidfd,
    peer_of,
    receive_hello,
    send_hello,
)

LEASES = st.builds(
    WardedLease,
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=36),
    st.floats(0.1, 100),
    st.binary(min_size=1, max_size=200),
)


class Table:
    """A table in this process's own memory."""

    def __init__(self) -> None:
        self.memory = bytearray(TABLE_BYTES)
        self.table = LeaseTable(memoryview(self.memory))

    def read(self, at: int, count: int) -> bytes:
        return bytes(self.memory[at : at + count])

    def state(self) -> TableState:
        state = read_state(self.read)
        assert state is not None
        return state

    def leases(self) -> list[WardedLease]:
        return read_leases(self.read, self.state().slots)


@given(st.lists(st.tuples(LEASES, st.booleans()), unique_by=lambda each: each[0].id, max_size=20))
def test_a_table_has_what_was_registered_and_not_withdrawn(
    changes: list[tuple[WardedLease, bool]],
) -> None:
    table, expected = Table(), {}
    for lease, keep in changes:
        table.table.register(lease)
        expected[lease.id] = lease
        if not keep:
            table.table.withdraw(lease.id)
            del expected[lease.id]
        assert {each.id: each for each in table.leases()} == expected


@given(LEASES, st.data())
def test_a_torn_lease_is_left_out(lease: WardedLease, data: st.DataObject) -> None:
    """The holder was killed while it wrote: any part of the record may be missing."""
    table, after = Table(), Table()
    after.table.register(lease)
    written = [n for n in range(256, 512) if after.memory[n] != table.memory[n]]
    table.memory[24] = 1
    for at in data.draw(st.lists(st.sampled_from(written), unique=True, max_size=len(written) - 1)):
        table.memory[at] = after.memory[at]
    assert table.leases() == []


def test_a_table_that_is_full_says_so_and_keeps_what_it_has() -> None:
    table = Table()
    registered = 0
    with pytest.raises(TableFull):
        for number in range(TABLE_BYTES):
            table.table.register(WardedLease(str(number), 1.0, b"w"))
            registered += 1
    assert registered == len(table.leases()) > 4000
    table.table.withdraw("7")
    table.table.register(WardedLease("later", 1.0, b"w"))
    with pytest.raises(TableFull, match="too long"):
        table.table.register(WardedLease("x", 1.0, bytes(300)))


def test_memory_that_is_not_a_table_says_nothing() -> None:
    assert read_state(lambda at, count: bytes(count)) is None
    assert read_state(lambda at, count: b"") is None


def test_more_runs_than_there_is_room_for_are_never_taken_for_ended() -> None:
    table = Table()
    runs = [table.table.run_begins() for _ in range(17)]
    for run in runs:
        table.table.run_ended(run)
    assert table.state().runs


# Decisions: every order of everything that can happen, compared with what must follow from it.

INPUTS = ("died", "ended", "bye", "word", "stale word", "run", "closed")


def verdict_of(history: tuple[str, ...]) -> Verdict:
    """What must be decided, told as simply as possible: by looking at the whole history."""
    for length in range(1, len(history) + 1):
        past = history[:length]
        if past[-1] in ("run", "closed"):
            continue  # written to the table, which does not wake the warden
        died = "died" in past
        run = "run" in past and "word" not in past
        closed = "closed" in past
        if "bye" in past or (closed and (died or "ended" in past)):
            return Verdict.LEAVE
        if died and not run:
            return Verdict.END
        if died and "ended" in past:
            return Verdict.LEAVE
    return Verdict.WAIT


def test_every_history_of_a_holder_is_judged_as_it_must_be() -> None:
    for length in range(1, 6):
        for history in product(INPUTS, repeat=length):
            # A dead process begins no run and closes nothing; nobody speaks on a link that ended.
            after_death = history[history.index("died") + 1 :] if "died" in history else ()
            after_end = history[history.index("ended") + 1 :] if "ended" in history else ()
            if {"run", "closed", "bye", "died"} & set(after_death) or len(set(history)) < len(
                history
            ):
                continue
            if {"bye", "word", "stale word", "ended"} & set(after_end):
                continue
            if "word" in history and "run" not in history[: history.index("word")]:
                continue
            table = Table()
            watch = HolderWatch(table.state)
            last = Verdict.WAIT
            for each in history:
                match each:
                    case "died":
                        last = watch.died()
                    case "ended":
                        last = watch.link_ended()
                    case "bye":
                        last = watch.heard(BYE)
                    case "word":
                        last = watch.heard(1)
                    case "stale word":
                        last = watch.heard(99)
                    case "run":
                        assert table.table.run_begins() == 1
                    case "closed":
                        table.table.close()
                if last is not Verdict.WAIT:
                    break
            assert last is verdict_of(history), history


def test_the_end_of_the_link_alone_ends_nothing() -> None:
    table = Table()
    watch = HolderWatch(table.state)
    assert watch.link_ended() is Verdict.WAIT
    assert watch.died() is Verdict.END


def test_a_damaged_table_ends_nothing() -> None:
    assert HolderWatch(lambda: None).died() is Verdict.LEAVE


# Frozen holders


class Holder:
    """A holder that answers pings as long as it is not frozen."""

    def __init__(self, frozen_after_s: float = 1.0) -> None:
        self.watch = FrozenWatch(frozen_after_s)
        self.table = Table()
        self.table.table.bodies(1)
        self.frozen = False
        self.now = 0.0

    def tick(self, after_s: float | None = None) -> bool:
        """Let a tick pass; whether the holder is to be killed."""
        self.now += self.watch.tick_s if after_s is None else after_s
        said = self.watch.tick(self.now, self.table.state())
        if isinstance(said, Ping) and not self.frozen:
            self.table.table.answer(said.number)
        return said == "kill"

    def ticks_until_killed(self) -> int:
        return next(n for n in range(100) if self.tick())


def test_an_idle_holder_that_answers_is_never_killed() -> None:
    holder = Holder()
    assert not any(holder.tick() for _ in range(1000))


def test_a_frozen_holder_is_killed_after_its_time() -> None:
    holder = Holder()
    holder.tick()
    holder.frozen = True
    assert TICKS <= holder.ticks_until_killed() <= TICKS + 1


def test_a_holder_without_a_term_is_never_killed() -> None:
    holder = Holder()
    holder.table.table.bodies(0)
    holder.frozen = True
    assert not any(holder.tick() for _ in range(100))
    holder.table.table.bodies(1)
    assert holder.ticks_until_killed() >= TICKS


def test_after_a_late_tick_the_count_begins_anew() -> None:
    """After a suspend or a pause of the whole machine, the warden may run before the holder."""
    holder = Holder()
    holder.tick()
    holder.frozen = True
    for _ in range(TICKS):
        assert not holder.tick()
    assert not holder.tick(after_s=3600.0)
    holder.frozen = False
    holder.table.table.answer(holder.table.state().answered + 1)
    assert not any(holder.tick() for _ in range(100))


def test_a_warden_that_is_always_late_kills_nobody() -> None:
    holder = Holder()
    holder.tick()
    holder.frozen = True
    assert not any(holder.tick(after_s=1.0) for _ in range(100))


def test_a_new_warden_goes_on_from_the_last_number() -> None:
    holder = Holder()
    for _ in range(10):
        holder.tick()
    holder.watch = FrozenWatch(1.0)
    assert not any(holder.tick() for _ in range(100))


# Ending leases


class Engine(MemoryStore):
    """A store whose `end` raises the given errors first."""

    def __init__(self, server: MemoryServer, clock: VirtualClock) -> None:
        super().__init__(server, Context(clock, lambda event: None))
        self.errors: list[StoreError] = []
        self.forever: StoreError | None = None
        self.attempts = 0

    async def end(self, warrant: bytes) -> None:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        if self.forever is not None:
            raise self.forever
        await super().end(warrant)


def ending(
    during: Callable[[Engine], None], *, settle_s: float = 0.0, audit: str | None = None
) -> tuple[Engine, float, bool]:
    """End one lease of a store. The store, how long it took, and whether the lease has ended."""
    clock = VirtualClock()

    async def main() -> tuple[Engine, float, bool]:
        engine = Engine(MemoryServer(clock), clock)
        during(engine)
        lease = await engine.grant(1e9)

        async def opener(_: str) -> Store:
            return engine

        stores = KeptStores(opener)
        hello = Hello(session="s", url="memory://", settle_s=settle_s, audit=audit)
        stores.acquire(hello.url)
        ender = LeaseEnder(stores, Witness(clock, "warden"), clock, 1e6)
        began = clock.now()
        await ender.end(hello, [WardedLease(lease.id, 2.0, engine.warrant(lease))])
        took_s = clock.now() - began
        try:
            await engine.renew(lease)
        except LeaseGone:
            return engine, took_s, True
        return engine, took_s, False

    return run_virtual(main, clock=clock)


def test_a_lease_is_ended_at_once() -> None:
    engine, took_s, ended = ending(lambda engine: None)
    assert (engine.attempts, took_s, ended) == (1, 0.0, True)


def test_settling_is_waited_for() -> None:
    assert ending(lambda engine: None, settle_s=0.5)[1:] == (0.5, True)


def test_an_engine_that_is_away_is_tried_until_it_is_back() -> None:
    def away(engine: Engine) -> None:
        engine.errors = [StoreUnavailable("away")] * 200

    engine, took_s, ended = ending(away)
    assert ended
    assert engine.attempts == 201
    assert took_s > 10 * ANSWERED_TTLS * 2.0  # ten ttls of an engine that does not answer are none


def test_an_engine_that_answers_and_does_not_end_it_is_left_after_ten_ttls() -> None:
    def refuses(engine: Engine) -> None:
        engine.forever = OutcomeUnknown("it may have been done")

    _, took_s, ended = ending(refuses)
    assert not ended
    assert 0.9 * ANSWERED_TTLS * 2.0 <= took_s <= 2 * ANSWERED_TTLS * 2.0


def test_what_trying_again_does_not_cure_is_not_tried_again() -> None:
    def void(engine: Engine) -> None:
        engine.forever = StoreUnusable("of another cluster")

    engine, _, ended = ending(void)
    assert (engine.attempts, ended) == (1, False)


def test_without_the_audit_log_the_lease_is_left_to_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(call: Callable[[], None]) -> None:
        call()

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    engine, _, ended = ending(lambda engine: None, audit=str(tmp_path / "missing" / "audit"))
    assert (engine.attempts, ended) == (0, False)
    log = tmp_path / "audit.jsonl"
    assert ending(lambda engine: None, audit=str(log))[2]
    (line,) = log.read_text().splitlines()
    assert '"event":"leaseended"' in line
    assert '"cause":"died"' in line
    assert not verify_lines(read([log])).violations


# Who is trusted


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_hello_carries_the_session_and_both_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    hello = Hello(session="s", url="etcd://u:p@h", environment={"PGPASSWORD": "x"}, settle_s=0.5)
    memory, pidfd = os.memfd_create("t"), own_pidfd()
    send_hello(pair[0], hello, pidfd, memory)
    os.close(pidfd)
    received, passed, table = receive_hello(pair[1])
    assert received == hello
    assert os.fstat(table).st_ino == os.fstat(memory).st_ino
    assert not os.get_inheritable(passed)
    os.close(holder_pidfd(pair[1], passed))
    os.close(memory)
    os.close(table)


@pytest.mark.parametrize("sent", [b"", b"no JSON", b"[]", b'{"version":1}', b'{"version":9}'])
def test_anything_but_a_hello_is_refused(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    memory, pidfd = os.memfd_create("t"), own_pidfd()
    socket.send_fds(pair[0], [sent], [pidfd, memory])
    os.close(pidfd)
    os.close(memory)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused):
        receive_hello(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_is_no_pidfd_of_the_peer_is_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(Refused, match="pidfd of its own"):
        holder_pidfd(pair[1], os.open("/dev/null", os.O_RDONLY))
    with pytest.raises(Refused, match="pidfd of its own"):
        holder_pidfd(pair[1], os.pidfd_open(os.getppid()))


def test_without_the_kernels_own_pidfd_the_passed_one_counts(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doyen.warden.wire._SO_PEERPIDFD", 9999)
    passed = own_pidfd()
    assert holder_pidfd(pair[1], passed) == passed
    os.close(passed)


def test_a_process_of_another_user_is_refused(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_of(pair[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(Refused, match="4711"):
            peer_of(pair[0])


def test_a_user_that_the_namespace_does_not_know_is_refused(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: (1).to_bytes(4, "little") * 1)
    nobody = 65534
    packed = b"".join(n.to_bytes(4, "little") for n in (1, nobody, nobody))
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: packed)
    monkeypatch.setattr(os, "geteuid", lambda: nobody)
    with pytest.raises(Refused, match="namespace"):
        peer_of(pair[0])


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    location.check_directory(own)
    own.chmod(0o777)
    with pytest.raises(Refused, match="writable"):
        location.check_directory(own)
    own.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(own)
    with pytest.raises(Refused, match="not a directory"):
        location.check_directory(link)
    with pytest.raises(Refused, match="No such file"):
        location.check_directory(tmp_path / "missing")


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.lstat(tmp_path)
    other = os.stat_result((stat.S_IFDIR | 0o700, *found[1:4], 4711, *found[5:10]))
    monkeypatch.setattr(os, "lstat", lambda path: other)
    with pytest.raises(Refused, match="belongs to user 4711"):
        location.check_directory(tmp_path)


def test_the_socket_is_at_a_fixed_place_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOYEN_WARDEN", raising=False)
    uid = os.geteuid()
    assert location.places() == [
        Path(f"/run/doyen/{uid}/warden"),
        Path(f"/run/user/{uid}/doyen/warden"),
    ]
    monkeypatch.setenv("DOYEN_WARDEN", "/elsewhere")
    assert location.places() == [Path("/elsewhere")]
    monkeypatch.setenv("DOYEN_WARDEN", "off")
    assert location.socket_path() is None


def test_an_embedded_interpreter_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "uwsgi"
    server.write_text("#!/bin/sh")
    server.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(server))
    found = interpreter()
    assert os.path.basename(found).startswith("python")
    monkeypatch.setattr("sys._base_executable", str(server))
    monkeypatch.setattr("sys.exec_prefix", str(tmp_path))
    monkeypatch.setattr("sys.base_exec_prefix", str(tmp_path))
    with pytest.raises(Refused, match="uwsgi"):
        interpreter()


def test_relative_files_of_a_url_are_made_absolute() -> None:
    assert portable_url("etcd://h1/p", "/srv") == "etcd://h1/p"
    assert portable_url("etcd://h1?ca=/a&cert=/b", "/srv") == "etcd://h1?ca=/a&cert=/b"
    moved = portable_url("redis://h1?tls=true&ca=x.pem&prefix=a%26b", "/srv")
    assert moved == "redis://h1?tls=true&ca=%2Fsrv%2Fx.pem&prefix=a%26b"


def test_options_are_checked() -> None:
    from doyen import connect

    for wrong in ({"warden": "daemon"}, {"settle_s": -1}, {"frozen_after_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            connect("memory://", **wrong)
    with pytest.raises(ConfigError, match="needs a warden"):
        connect("memory://", frozen_after_s=1, warden="none")


def test_a_warrant_of_another_store_is_void_by_default() -> None:
    async def main() -> None:
        store = await open_store("memory://void", Context(VirtualClock(), lambda event: None))
        lease = await store.grant(1.0)
        assert Store.warrant(store, lease) == b""
        with pytest.raises(StoreUnusable, match="cannot end"):
            await Store.end(store, b"x")

    run_virtual(main)


# What `doyen doctor` says


@pytest.mark.parametrize(
    ("here", "level", "words"),
    [
        (Surroundings(has_pidfd=False), "note", "cannot help"),
        (Surroundings(), "note", "no warden serves"),
        (Surroundings(host="/run/w"), "ok", "/run/w serves this user"),
        (Surroundings(host="/run/w", in_container=True), "ok", "serves"),
        (Surroundings(in_container=True), "warning", "process 1"),
        (Surroundings(oom_group="/a"), "warning", "memory.oom.group"),
        (Surroundings(mixed_unit="a.service"), "warning", "KillMode=mixed"),
        (Surroundings(refused="others may write"), "warning", "others may write"),
    ],
)
def test_doctor_says_where_a_warden_cannot_help(here: Surroundings, level: str, words: str) -> None:
    first, *_ = findings(here)
    assert first.level == level
    assert words in first.text


def test_a_control_group_above_counts_too(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert diagnosis._oom_group("/outer/inner", str(tmp_path)) == ""
    (inner / "memory.oom.group").write_text("0\n")
    (tmp_path / "outer" / "memory.oom.group").write_text("1\n")
    assert diagnosis._oom_group("/outer/inner", str(tmp_path)) == "/outer"


def test_the_kill_mode_is_that_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text('#!/bin/sh\n[ "$3" = app.service ] && echo KillMode=mixed\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert diagnosis._mixed_unit("/system.slice/app.service") == "app.service"
    assert diagnosis._mixed_unit("/system.slice/other.service") == ""
    assert diagnosis._mixed_unit("/user.slice") == ""


def test_this_machine_can_be_looked_at() -> None:
    assert [*findings(diagnosis.look())]


# What the session registers


class Recorded(NoWarden):
    """Knows what is registered, and what ever was."""

    def __init__(self) -> None:
        self.registered: dict[str, bytes] = {}
        self.ever: set[str] = set()
        self.most_bodies = 0

    def register(self, lease: Lease, warrant: bytes) -> None:
        assert warrant
        self.registered[lease.id] = warrant
        self.ever.add(lease.id)

    def withdraw(self, lease: Lease) -> None:
        del self.registered[lease.id]

    def bodies(self, number: int) -> None:
        self.most_bodies = max(self.most_bodies, number)


class Registering(MemoryStore):
    """A store in which nothing is bound to a lease that is not registered."""

    warding: Recorded

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        assert lease.id in self.warding.registered
        return await super().create(key, value, lease)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        assert lease.id in self.warding.registered
        return await super().enqueue(line, value, lease, rank=rank)


def test_every_lease_is_registered_before_its_first_use_and_withdrawn_when_given_up() -> None:
    clock = VirtualClock()
    warding = Recorded()

    async def main() -> None:
        runtime = InlineRuntime(clock)
        store = Registering(MemoryServer(clock), Context(clock, lambda event: None))
        store.warding = warding
        settings = SessionSettings("memory://", ttl_s=3.0)
        async with Session(settings, runtime, store, warding) as session:
            async with session.member("group", name="a"), session.campaign("shared"):
                assert len(warding.registered) == 1
            with pytest.raises(LeadershipLost):
                async with session.campaign("stalling", stall_after_s=60):
                    assert len(warding.registered) == 2
                    ordered = asyncio.ensure_future(session.resign("stalling"))
                    await asyncio.sleep(30)
            await ordered
            await asyncio.sleep(1)
            assert len(warding.registered) == 1
            store._server.revoke(next(iter(warding.registered)))
            await asyncio.sleep(5)
            async with session.campaign("again"):
                assert len(warding.registered) == 1
        assert not warding.registered
        assert len(warding.ever) == 4  # shared, of the campaign, of the order, shared again
        assert warding.most_bodies == 1

    run_virtual(main, clock=clock)


# What is not killed


def test_a_traced_process_and_one_that_changed_its_user_are_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = "import ctypes, time; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True);"
    with subprocess.Popen(
        [sys.executable, "-c", f"{traced} time.sleep(60)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert must_not_be_killed(process.pid) == "it is being traced"
        process.kill()
    assert must_not_be_killed(os.getpid()) == ""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert must_not_be_killed(os.getpid()) == "it has changed its user"
    assert "cannot be read" in must_not_be_killed(2**22 + 1)


def test_the_guards_word_arrives_although_a_ping_was_left_unread(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    holder, warden = pair
    warden.send(encode_number(7))
    holder.send(encode_number(1))
    holder.close()
    assert receive_despite_reset(warden) == encode_number(1)
    assert receive_despite_reset(warden) == b""


def test_without_a_pidfd_a_session_goes_on_without_a_warden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", none)
    seen: list[Record] = []
    with (
        connect_blocking(
            f"sqlite://{tmp_path}/a.db", warden="process", frozen_after_s=5, on_event=seen.append
        ) as session,
        session.campaign("e") as term,
    ):
        assert term.valid
    reasons = [each.event.reason for each in seen if isinstance(each.event, Unwarded)]
    assert reasons == ["this system has no pidfd: [Errno 38] Function not implemented"]


def test_client_libraries_are_imported_off_doyens_loop() -> None:
    """On the loop, other sessions could not answer their warden meanwhile."""
    program = """
import sys, threading, doyen
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "kazoo":
            print(threading.current_thread().name)
sys.meta_path.insert(0, Finder)
try:
    with doyen.connect_blocking("zookeeper://127.0.0.1:1?connect_timeout_s=0.1"): pass
except doyen.StoreUnavailable:
    pass
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.split() == ["doyen-aside"], said.stderr
