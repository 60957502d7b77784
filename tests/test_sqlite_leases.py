"""Leases as files: an ended lease stays ended, and no interleaving confirms a renewal of it."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doyen.errors import LeaseGone
from doyen.lease.clock import VirtualClock
from doyen.stores.sqlite import leases as module
from doyen.stores.sqlite.leases import LeaseFile, LeaseFileVerdict, LocalLeases
from doyen.stores.sqlite.location import SessionsDirectory

TTL_S = 10.0


class Bench:
    """A directory of leases, and handles to it with their own clocks and boot ids."""

    def __init__(self, path: Path) -> None:
        database = path / "x.db"
        database.touch()
        self.directory = SessionsDirectory(str(database))
        self.directory.make()
        self.clock = VirtualClock()
        self.ended: list[tuple[str, str]] = []
        self._handles: list[LocalLeases] = []

    def handle(
        self,
        kind: type[LocalLeases] = LocalLeases,
        *,
        now: Callable[[], float] | None = None,
        boot: str = "this boot",
    ) -> LocalLeases:
        handle = kind(
            self.directory,
            now=now or self.clock.now,
            boot=boot,
            ended=lambda lease, cause: self.ended.append((lease, cause)),
        )
        handle.looks_only = False
        self._handles.append(handle)
        return handle

    def files(self) -> set[str]:
        return set(os.listdir(self.directory.path))

    def close(self) -> None:
        for handle in self._handles:
            handle.release_all()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_two_threads_that_find_a_lease_ended_emit_it_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of a store and its database thread judge the same leases."""
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    owner.release(lease)
    both = threading.Barrier(2)
    is_dead = module._owner_is_dead

    def proven(fd: int) -> bool:
        dead = is_dead(fd)
        both.wait(10)
        return dead

    monkeypatch.setattr(module, "_owner_is_dead", proven)
    verdicts: list[LeaseFileVerdict] = []
    other = threading.Thread(target=lambda: verdicts.append(judge.judge(lease)))
    other.start()
    verdicts.append(judge.judge(lease))
    other.join()
    assert [verdict.ended for verdict in verdicts] == [True, True]
    assert bench.ended == [(lease, "died")]
    assert bench.files() == set()


def test_a_renewed_lease_lives_until_its_ttl_has_passed(bench: Bench) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    bench.clock.advance(9)
    owner.renew(lease)
    bench.clock.advance(9)
    assert judge.judge(lease) == LeaseFileVerdict(False, 1.0, 1.0)
    bench.clock.advance(1)
    assert judge.judge(lease).ended
    assert bench.ended == [(lease, "expired")]
    assert bench.files() == set()
    with pytest.raises(LeaseGone, match=r"ran out 0\.000 s before"):
        owner.renew(lease)


def test_suspend_counts_and_the_wall_clock_does_not(bench: Bench) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    bench.clock.step_wall(1e9)
    assert not judge.judge(lease).ended
    bench.clock.step_wall(-2e9)
    owner.renew(lease)
    assert not judge.judge(lease).ended
    bench.clock.suspend(TTL_S)
    assert judge.judge(lease).ended


def test_a_released_lock_proves_death_at_once(bench: Bench) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    copies = [os.dup(fd) for fd in owner.proof(lease)]
    owner.release(lease)
    assert not judge.judge(lease).ended  # a supervisor holds copies
    for fd in copies:
        os.close(fd)
    assert judge.judge(lease).ended
    assert judge.judge(lease).ended
    assert bench.ended == [(lease, "died")]
    with pytest.raises(LeaseGone, match="released"):
        owner.renew(lease)


def test_a_handle_does_not_judge_its_own_leases_as_dead(bench: Bench) -> None:
    owner = bench.handle()
    lease = owner.grant(TTL_S)
    assert not owner.judge(lease).ended
    bench.clock.advance(TTL_S)
    assert owner.judge(lease).ended
    assert bench.ended == []  # emitted only for leases of others


def test_revoked_by_another(bench: Bench) -> None:
    owner, other = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    other.end(lease)
    assert owner.judge(lease).ended
    with pytest.raises(LeaseGone, match="ended by another session"):
        owner.renew(lease)


def _judged_beside_another_judge(bench: Bench) -> bool:
    """Judge a dead lease while another judge is frozen during its own probe of the lock."""
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    owner.release(lease)
    other = os.open(bench.directory.file(lease, "lease"), os.O_RDONLY)
    try:
        assert module._owner_is_dead(other)
        return judge.judge(lease).ended
    finally:
        os.close(other)


def test_concurrent_judges_do_not_hide_an_owners_death(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _judged_beside_another_judge(bench)

    def exclusively(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    monkeypatch.setattr(module, "_owner_is_dead", exclusively)
    assert not _judged_beside_another_judge(bench), "the test cannot fail"


class TrustsTheLock(LocalLeases):
    """Broken: trusts locks and clocks of another boot."""

    def _by_change(
        self, lease: str, fd: int, raw: bytes, record: LeaseFile | None
    ) -> LeaseFileVerdict:
        assert record is not None
        return self._by_lock_or_clock(lease, fd, record)


def test_a_lease_of_another_boot_expires_after_a_full_ttl_here(bench: Bench) -> None:
    def foreign() -> str:
        owner = bench.handle(boot="another boot", now=lambda: 1e6)
        lease = owner.grant(TTL_S)
        owner.release(lease)  # unlocked on this kernel, which proves nothing about another
        return lease

    lease = foreign()
    judge = bench.handle()
    bench.clock.advance(1e9)  # the clocks of two boots are not comparable
    assert judge.judge(lease) == LeaseFileVerdict(False, TTL_S)
    bench.clock.advance(TTL_S - 1)
    assert judge.judge(lease) == LeaseFileVerdict(False, 1.0)
    bench.clock.advance(1)
    assert judge.judge(lease).ended
    assert bench.ended == [(lease, "expired")]
    assert bench.handle(TrustsTheLock).judge(foreign()).ended, "the test cannot fail"


def test_a_renewal_under_another_boot_restarts_the_wait(bench: Bench) -> None:
    owner = bench.handle(boot="another boot", now=lambda: 0.0)
    lease = owner.grant(TTL_S)
    judge = bench.handle()
    assert judge.judge(lease) == LeaseFileVerdict(False, TTL_S)
    bench.clock.advance(TTL_S)
    owner.renew(lease)
    assert judge.judge(lease) == LeaseFileVerdict(False, TTL_S)
    bench.clock.advance(TTL_S)
    assert judge.judge(lease).ended
    with pytest.raises(LeaseGone):
        owner.renew(lease)


def test_a_torn_record_is_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    whole = os.pread(owner.proof(lease)[0], 1000, 0)
    reads = iter([whole[:30] + b"\0" * (len(whole) - 30), whole[:-1], b"", whole])
    monkeypatch.setattr(module, "os", _Shim(pread=lambda *args: next(reads)))
    assert not judge.judge(lease).ended
    assert next(reads, None) is None


def test_an_unreadable_lease_file_ends_only_by_death_or_timeout(bench: Bench) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    os.pwrite(owner.proof(lease)[0], b"\xff" * 20, 0)
    for _ in range(3):
        assert not judge.judge(lease).ended  # its owner is alive and will write it again
        bench.clock.advance(module.UNREADABLE_S)
    owner.release(lease)
    assert judge.judge(lease).ended

    lease = owner.grant(TTL_S)
    os.truncate(bench.directory.file(lease, "lease"), 0)
    owner.release(lease)
    assert judge.judge(lease) == LeaseFileVerdict(False, module.UNREADABLE_S)
    bench.clock.advance(module.UNREADABLE_S)
    assert judge.judge(lease).ended


def test_a_renewal_repairs_an_unreadable_lease_file(bench: Bench) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    os.pwrite(owner.proof(lease)[0], b"\xff" * 20, 0)
    assert judge.judge(lease).remaining_s is None
    owner.renew(lease)
    assert judge.judge(lease).remaining_s == TTL_S


def test_only_a_missing_file_ends_a_lease_not_a_failure_to_open_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)

    def exhausted(*args: Any, **kwargs: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module, "os", _Shim(open=exhausted))
        with pytest.raises(OSError, match="Too many"):
            judge.judge(lease)
    assert not judge.judge(lease).ended


def test_a_closed_or_reused_descriptor_is_detected_before_a_write(
    bench: Bench, tmp_path: Path
) -> None:
    owner = bench.handle()
    lease = owner.grant(TTL_S)
    fd = owner.proof(lease)[0]
    os.close(fd)
    with pytest.raises(LeaseGone, match="closed by this process"):
        owner.renew(lease)
    (tmp_path / "precious").write_text("precious")
    other = os.open(tmp_path / "precious", os.O_RDWR)
    os.dup2(other, fd)
    with pytest.raises(LeaseGone, match="closed by this process"):
        owner.renew(lease)
    os.close(other)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_sweep_between_creating_and_locking_the_file_causes_a_retry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = bench.handle()
    swept: list[str] = []

    def interfering(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(name for name in bench.files() if name.endswith(".lease"))
            os.unlink(f"{bench.directory.path}/{swept[0]}")
        elif len(swept) == 1:
            swept.append("locked")
            raise BlockingIOError
        fcntl.flock(fd, operation)

    flags = {name: getattr(fcntl, name) for name in dir(fcntl) if name.isupper()}
    shim = SimpleNamespace(**{**flags, "flock": interfering, "fcntl": fcntl.fcntl})
    monkeypatch.setattr(module, "fcntl", shim)
    lease = owner.grant(TTL_S)
    assert len(swept) == 2
    assert bench.files() == {f"{lease}.lease", f"{lease}.alive"}
    assert not owner.judge(lease).ended


def test_session_files_have_the_permissions_of_the_database(tmp_path: Path) -> None:
    database = tmp_path / "x.db"
    database.touch()
    database.chmod(0o660)
    directory = SessionsDirectory(str(database))
    directory.make()
    owner = LocalLeases(directory, now=lambda: 0.0, boot="b", ended=lambda *_: None)
    lease = owner.grant(1)
    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o770
    for part in ("lease", "alive"):
        assert stat.S_IMODE(os.stat(directory.file(lease, part)).st_mode) == 0o660
    owner.release_all()


def test_nothing_is_left_open_or_inherited(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    owner, judge = bench.handle(), bench.handle()
    lease = owner.grant(TTL_S)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    lock, alive = owner.proof(lease)
    assert lock > alive  # closed first on death, so the lock is free before the FIFO wakes others
    assert not os.get_inheritable(lock)
    assert not os.get_inheritable(alive)
    judge.judge(lease)
    owner.renew(lease)
    bench.clock.advance(TTL_S)
    judge.judge(lease)
    owner.release(lease)
    assert len(os.listdir("/proc/self/fd")) == before


# Every interleaving of the system calls of a renewal and a judgement.


class _Shim:
    """`os` with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Stage:
    """Runs one system call of one thread at a time, in a given order."""

    def __init__(self) -> None:
        self._actor = threading.local()
        self._go: dict[str, threading.Semaphore] = {}
        self._parked = threading.Semaphore(0)
        self._done: set[str] = set()
        self.results: dict[str, Any] = {}

    def stepping(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._actor, "name", None) is not None:
                self._parked.release()
                self._go[self._actor.name].acquire()
            return real(*args, **kwargs)

        return step

    def play(self, actors: dict[str, Callable[[], Any]], schedule: tuple[str, ...]) -> None:
        threads = []
        for name, act in actors.items():
            self._go[name] = threading.Semaphore(0)
            threads.append(threading.Thread(target=self._run, args=(name, act)))
            threads[-1].start()
            assert self._parked.acquire(timeout=10)
        rest = [name for name in actors for _ in range(20)]
        for name in (*schedule, *rest):
            if name not in self._done:
                self._go[name].release()
                assert self._parked.acquire(timeout=10)
        for thread in threads:
            thread.join(timeout=10)

    def _run(self, name: str, act: Callable[[], Any]) -> None:
        self._actor.name = name
        try:
            self.results[name] = act()
        except LeaseGone as gone:
            self.results[name] = gone
        self._done.add(name)
        self._parked.release()


class WithoutSeal(LocalLeases):
    """Broken: reports a lease as expired without sealing it first."""

    def _seal(self, lease: str) -> None:
        return


class WithoutUnlink(LocalLeases):
    """Broken: does not remove the lease file, so that a late write of the owner revives it."""

    def _remove(self, lease: str, *parts: str) -> None:
        return


class SealGoesFirst(LocalLeases):
    """Broken: removes the seal before the lease."""

    def _remove(self, lease: str, *parts: str) -> None:
        try:
            os.unlink(self._directory.file(lease, "seal"))
        except FileNotFoundError:
            pass
        super()._remove(lease, *parts)


def _interleavings(calls: int, among: int) -> Iterator[tuple[str, ...]]:
    for chosen in itertools.combinations(range(among), calls):
        yield tuple("owner" if turn in chosen else "judge" for turn in range(among))


def _violations(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type[LocalLeases]
) -> list[str]:
    """Run a renewal begun just before expiry and a judgement begun just after it in every order of
    their system calls. Return the orders in which both succeed."""
    found = []
    intercepted = ("open", "pread", "pwrite", "stat", "fstat", "unlink")
    for schedule in _interleavings(5, 13):
        now = 0.0
        owner = bench.handle(kind, now=lambda: now)  # noqa: B023 (read at once)
        judge = bench.handle(kind, now=lambda: TTL_S + 0.1)
        lease = owner.grant(TTL_S)
        now = TTL_S - 0.1
        stage = _Stage()
        with monkeypatch.context() as patch:
            shim = _Shim(**{name: stage.stepping(name) for name in intercepted})
            patch.setattr(module, "os", shim)
            stage.play(
                {
                    "owner": lambda: owner.renew(lease),  # noqa: B023
                    "judge": lambda: judge.judge(lease),  # noqa: B023
                },
                schedule,
            )
        renewed, ended = stage.results["owner"] is None, stage.results["judge"].ended
        later = bench.handle(kind, now=lambda: TTL_S + 0.2).judge(lease).ended
        if renewed and ended:
            found.append(f"renewed and ended: {schedule}")
        if ended and not later:
            found.append(f"ended and alive again: {schedule}")
        owner.release_all()
        for name in bench.files():
            os.unlink(f"{bench.directory.path}/{name}")
        if found and kind is not LocalLeases:
            break
    return found


def test_no_interleaving_confirms_a_renewal_of_an_ended_lease(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _violations(bench, monkeypatch, LocalLeases) == []


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        (WithoutSeal, "renewed and ended"),
        (WithoutUnlink, "ended and alive again"),
        (SealGoesFirst, "renewed and ended"),
    ],
)
def test_the_search_detects_broken_variants(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: type[LocalLeases], how: str
) -> None:
    found = _violations(bench, monkeypatch, broken)
    assert found
    assert found[0].startswith(how)


def test_lease_files_round_trip_and_damage_is_detected() -> None:
    record = LeaseFile(7, b"b" * 16, 1.5, 2.5, 42)
    raw = record.encode()
    assert LeaseFile.decode(raw) == record
    assert math.isclose(record.expires_at, 4.0)
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1
        assert LeaseFile.decode(bytes(flipped)) is None
    assert LeaseFile.decode(raw[:-1]) is None
    assert LeaseFile.decode(raw + b"\0") is None
