"""The supervisor and its guard, with real processes.

Safety here is one sentence: nothing of the command runs after its deadline, nor after the proof of
life has been let go. The commands under test stamp a file with the boot-time clock all the while,
so that the sentence can be checked against the last stamp.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from doyen.errors import GuardFailed, LeadershipLost
from doyen.supervise import Supervisor
from doyen.supervise.guard import EXTEND
from doyen.term import Term
from stamps import PATIENCE_S, PYTHON, Stamps, now, until

if not sys.platform.startswith("linux"):
    pytest.skip("whole process trees can be seen on Linux only", allow_module_level=True)


class Tenure(Term):
    """A term as the supervisor sees it, without a lease."""

    valid_until = stop_budget_s = 0.0
    run_number = 0

    def __init__(
        self, valid_s: float = 60.0, budget_s: float = 2.0, proof: tuple[int, ...] = ()
    ) -> None:
        self.token = 42
        self.valid_until = now() + valid_s
        self.stop_budget_s = budget_s
        self._descriptors = proof
        self._renewed: list[Callable[[float], None]] = []

    def _proof(self) -> tuple[int, ...]:
        return tuple(map(os.dup, self._descriptors))

    def _run_begins(self) -> int:
        return self.run_number

    def _run_ended(self, run: int) -> None:
        assert run == self.run_number

    def on_end(self, listener: Callable[[], None], /) -> None:
        pass

    def _on_renewal(self, listener: Callable[[float], None], /) -> None:
        self._renewed.append(listener)

    def renew(self, valid_s: float) -> None:
        self.valid_until = now() + valid_s
        for listener in self._renewed:
            listener(self.valid_until)


async def until_async(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting until {what}"
        await asyncio.sleep(0.001)


def run(
    command: list[str], term: Tenure | None = None, environ: dict[str, str] | None = None
) -> int:
    """Run a command to its end."""

    async def main() -> int:
        async with Supervisor(command, environ=environ) as supervisor:
            return await supervisor.run(term or Tenure())

    return asyncio.run(main())


@asynccontextmanager
async def running(
    work: Stamps, term: Tenure | None = None
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    """Start a command and wait until all its processes run."""
    async with Supervisor(work.command) as supervisor:
        body = asyncio.create_task(supervisor.run(term or Tenure(budget_s=3600.0)))
        await until_async(work.all_write, "all processes run")
        yield supervisor, body


async def cancel(body: asyncio.Task[int]) -> None:
    body.cancel()
    with pytest.raises(asyncio.CancelledError):
        await body


@pytest.fixture
def stamps(tmp_path: Path) -> Iterator[Callable[..., Stamps]]:
    made: list[Stamps] = []

    def make(*names: str) -> Stamps:
        made.append(Stamps(tmp_path / f"stamps{len(made)}", *names))
        return made[-1]

    yield make
    for each in made:
        each.kill()


# What the command sees, and what is seen of it.


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert run(["sh", "-c", script]) == code


def test_a_command_that_cannot_be_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    assert run([str(tmp_path / "absent")]) == 127
    assert run([str(plain)]) == 126
    assert "absent: No such file" in capfd.readouterr().err


def test_the_command_knows_its_term(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'echo "$DOYEN_TOKEN $DOYEN_NAME $HOME" > {out}'
    assert run(["sh", "-c", script], environ={"DOYEN_NAME": "ünï"}) == 0
    assert out.read_text() == f"42 ünï {os.environ['HOME']}\n"


def test_the_command_has_a_group_of_its_own_and_nothing_but_stdio(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        "import json, os, signal, sys\n"
        "state = [os.getpgid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd'))[:-1],\n"
        "         signal.getsignal(signal.SIGTERM) == 0, open('/proc/self/status').read()]\n"
        "json.dump(state, open(sys.argv[1], 'w'))\n"
    )
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)
    try:
        assert run([*PYTHON, "-c", script, str(out)], Tenure(proof=(lock,))) == 0
    finally:
        os.close(lock)
    leads_group, descriptors, default_term, status = json.loads(out.read_text())
    assert leads_group
    assert descriptors == ["0", "1", "2"]
    assert default_term
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) == 0


async def test_signals_reach_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"""
        trap 'echo usr1 >> {out}' USR1; trap 'echo hup >> {out}' HUP
        trap 'echo term >> {out}; exit 3' TERM
        echo ready >> {out}; while :; do read -r _ < {tmp_path}/never & wait $!; done"""
    os.mkfifo(tmp_path / "never")
    async with Supervisor(["sh", "-c", script]) as supervisor:
        body = asyncio.create_task(supervisor.run(Tenure()))
        for signum, answer in (
            (None, "ready"),
            (signal.SIGUSR1, "usr1"),
            (signal.SIGHUP, "hup"),
            (signal.SIGTERM, "term"),
        ):
            if signum:
                supervisor.forward(signum)
            await until_async(
                lambda: out.exists() and answer in out.read_text(),  # noqa: B023
                f"{answer} was answered",
            )
        assert await body == 3


async def test_a_signal_that_comes_with_the_start_is_not_lost() -> None:
    """It meets a child that has yet to become the command, and still has the guard's handlers."""
    async with Supervisor(["sleep", "3600"]) as supervisor:
        for signum in [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1] * 4:
            running = asyncio.ensure_future(supervisor.run(Tenure()))
            await asyncio.sleep(0)
            supervisor.forward(signum)
            async with asyncio.timeout(PATIENCE_S):
                assert await running == 128 + signum


async def test_the_command_can_be_run_again_under_the_same_guard(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async with Supervisor(["sh", "-c", f"echo $PPID >> {out}; exit 4"]) as supervisor:
        for _ in range(3):
            assert await supervisor.run(Tenure()) == 4
    assert len(set(out.read_text().split())) == 1


async def test_a_term_that_is_over_starts_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async with Supervisor(["touch", str(out)]) as supervisor:
        with pytest.raises(LeadershipLost):
            await supervisor.run(Tenure(valid_s=-0.001))
    assert not out.exists()


# The end comes in time, by whatever way.


def test_what_the_command_leaves_behind_ends_with_it(stamps: Callable[..., Stamps]) -> None:
    work = stamps("leave", "away", "daemon")
    assert run(work.command, Tenure(budget_s=0.3)) == 5
    assert not work.any_alive()


async def test_cancelling_stops_a_command_that_ends_on_sigterm_without_sigkill(
    stamps: Callable[..., Stamps],
) -> None:
    work = stamps("meek")
    async with running(work) as (_, body):
        await cancel(body)
        assert not work.any_alive()


async def test_a_stopped_command_is_continued_so_that_it_can_end(
    stamps: Callable[..., Stamps],
) -> None:
    work = stamps("meek")
    async with running(work) as (_, body):
        os.kill(work.pids()[0], signal.SIGSTOP)
        await cancel(body)


async def test_the_deadline_holds_for_the_whole_tree(stamps: Callable[..., Stamps]) -> None:
    work = stamps("away", "daemon")
    term = Tenure(valid_s=PATIENCE_S, budget_s=1.0)
    async with running(work, term) as (_, body):
        term.renew(0.2)  # the last renewal, and no word of loss
        with pytest.raises(LeadershipLost):
            await body
    assert not work.any_alive()
    assert term.valid_until < work.last() < term.valid_until + term.stop_budget_s


async def test_renewals_keep_it_running(stamps: Callable[..., Stamps]) -> None:
    work = stamps("meek")
    term = Tenure(valid_s=PATIENCE_S, budget_s=0.1)
    async with running(work, term) as (_, body):
        term.renew(0.15)
        first_deadline = term.valid_until
        term.renew(PATIENCE_S)
        await until_async(lambda: work.last() > first_deadline + 0.1, "that deadline is past")
        assert not body.done()
        await cancel(body)


async def test_kill_does_not_wait(stamps: Callable[..., Stamps]) -> None:
    work = stamps("away")
    async with running(work) as (supervisor, body):
        supervisor.kill()
        assert await body == 128 + signal.SIGKILL
    assert not work.any_alive()


# Somebody is killed or frozen.


async def test_the_guard_is_killed(
    stamps: Callable[..., Stamps], caplog: pytest.LogCaptureFixture
) -> None:
    work = stamps("away", "daemon")
    with subprocess.Popen(["sleep", "3600"]) as bystander:
        try:
            async with running(work) as (_, body):
                os.kill(work.guard(), signal.SIGKILL)
                assert await body == 128 + signal.SIGKILL
                assert not work.any_alive()
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert "event=guard_died" in caplog.text


async def test_after_the_guards_death_the_next_run_has_a_new_one(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async with Supervisor(["sh", "-c", f"echo $PPID >> {out}"]) as supervisor:
        await supervisor.run(Tenure())
        os.kill(int(out.read_text()), signal.SIGKILL)
        await until_async(lambda: supervisor._guard is None, "the death was noticed")
        assert await supervisor.run(Tenure()) == 0
    assert len(set(out.read_text().split())) == 2


async def test_the_guard_is_frozen_and_leadership_lost(stamps: Callable[..., Stamps]) -> None:
    work = stamps("away", "daemon")
    async with running(work, Tenure(budget_s=1.0)) as (_, body):
        os.kill(work.guard(), signal.SIGSTOP)
        lost_at = now()
        await cancel(body)
        assert not work.any_alive()
    assert lost_at + 1.0 > work.last()


@pytest.mark.parametrize("full", [False, True])
async def test_a_frozen_guard_that_does_not_start_the_command_is_replaced(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room in its socket, and without."""
    monkeypatch.setattr("doyen.supervise.START_WITHIN_S", 60.0 if full else 0.2)
    async with Supervisor(["true"]) as supervisor:
        term = Tenure()
        assert await supervisor.run(term) == 0
        assert supervisor._guard is not None
        os.kill(supervisor._guard.pid, signal.SIGSTOP)
        while full and supervisor._send(EXTEND, valid_until=term.valid_until):
            pass
        reason = "reads no messages" if full else "within 0.2 s"
        with pytest.raises(GuardFailed, match=reason):
            await supervisor.run(term)
        assert await supervisor.run(term) == 0


class Host:
    """A process in `doyen`'s place, holding a lock as its proof of life."""

    def __init__(self, lock: Path, work: Stamps, *, valid_s: float, budget_s: float) -> None:
        self.lock = lock
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(lock), str(valid_s), str(budget_s), *work.command],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.valid_until = float(self.process.stdout.readline())
        until(work.all_write, "the tree runs")

    def lock_is_free(self) -> bool:
        descriptor = os.open(self.lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True


@contextmanager
def host(lock: Path, work: Stamps, *, valid_s: float, budget_s: float) -> Iterator[Host]:
    hosting = Host(lock, work, valid_s=valid_s, budget_s=budget_s)
    try:
        yield hosting
    finally:
        hosting.process.kill()
        hosting.process.wait()
        assert hosting.process.stdout is not None
        hosting.process.stdout.close()


def test_doyen_is_killed(tmp_path: Path, stamps: Callable[..., Stamps]) -> None:
    work = stamps("away", "daemon")
    with host(tmp_path / "lock", work, valid_s=60.0, budget_s=0.5) as hosting:
        assert not hosting.lock_is_free()
        hosting.process.kill()
        hosting.process.wait()
        until(hosting.lock_is_free, "the proof of life was let go")
        released = now()
        until(lambda: not work.any_alive(), "the tree is gone")
        assert work.last() < released


def test_doyen_is_killed_and_the_command_ends_on_sigterm(
    tmp_path: Path, stamps: Callable[..., Stamps]
) -> None:
    work = stamps("meek")
    with host(tmp_path / "lock", work, valid_s=3600.0, budget_s=3600.0) as hosting:
        hosting.process.kill()
        until(hosting.lock_is_free, "the proof of life was let go")
        released = now()
        until(lambda: not work.any_alive(), "the command is gone")
        assert work.last() < released


def test_doyen_is_frozen(tmp_path: Path, stamps: Callable[..., Stamps]) -> None:
    work = stamps("away", "daemon")
    with host(tmp_path / "lock", work, valid_s=1.0, budget_s=1.0) as hosting:
        os.kill(hosting.process.pid, signal.SIGSTOP)
        until(lambda: not work.any_alive(), "the tree is gone")
        assert hosting.valid_until < work.last() < hosting.valid_until + 1.0
        assert not hosting.lock_is_free()  # the frozen process has a copy of its own


def test_a_service_manager_signals_every_process_it_sees(
    tmp_path: Path, stamps: Callable[..., Stamps]
) -> None:
    work = stamps("away")
    with host(tmp_path / "lock", work, valid_s=60.0, budget_s=0.5) as hosting:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(work.guard(), signum)
        hosting.process.kill()
        until(hosting.lock_is_free, "the proof of life was let go")
        released = now()
        until(lambda: not work.any_alive(), "the tree is gone")
        assert work.last() < released


async def _host(lock: str, valid_s: str, budget_s: str, *command: str) -> None:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    async with Supervisor(command) as supervisor:
        term = Tenure(float(valid_s), float(budget_s), (descriptor,))
        print(term.valid_until, flush=True)
        await supervisor.run(term)


if __name__ == "__main__":
    asyncio.run(_host(*sys.argv[1:]))
