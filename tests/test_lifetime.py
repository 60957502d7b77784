"""Sessions are released when the process ends, at exit and on SIGTERM, not in a forked child; and a
handler of the user's is kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import doyen
import servers
from doyen.lease import lifetime
from stamps import Stamps, until
from stamps import now as boot_time
from support import STOP_BUDGET_S, TTL_S, Place, core_of, now, promptly, virtual

WITHIN_S = 30.0
PRELUDE = """
import asyncio, os, signal, sys, threading, time
import doyen
STORE, AUDIT = sys.argv[1:3]
OPTIONS = dict(ttl_s=60, audit=AUDIT)
def say(text):
    # Not print: a handler of a signal may interrupt it, and print is not reentrant.
    os.write(1, f"{text}\\n".encode())
def rest():
    # Not one long sleep: Python runs no handler for a signal that arrives just before a blocking
    # call until that call returns.
    while True:
        time.sleep(0.05)
"""

BLOCKING = """
with doyen.connect_blocking(STORE, **OPTIONS) as session, session.campaign("e") as term:
    say("leading")
    rest()
"""
BUSY = """
with doyen.connect_blocking(STORE, **OPTIONS) as session, session.campaign("e") as term:
    say("leading")
    while True:
        try:
            sum(range(1000))
        except BaseException:
            pass
"""
THREADS = """
session = doyen.connect_blocking(STORE, **OPTIONS).open()
def work():
    with session.campaign("e") as term:
        say("leading")
        term.wait_lost()
        say("ended")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
ASYNCIO = """
async def main():
    async with doyen.connect(STORE, **OPTIONS) as session:
        async with session.campaign("e") as term:
            say("leading")
            await asyncio.sleep(60)
asyncio.run(main())
"""
STUCK_LOOP = ASYNCIO.replace("await asyncio.sleep(60)", "rest()")
CALLBACKS = """
session = doyen.connect_blocking(STORE, **OPTIONS).open()
candidate = session.candidate(
    "e", on_elected=lambda term: say("leading"), on_lost=lambda term: say("ended")
).open()
rest()
"""
SCHEDULER = """
from doyen.lease.lifetime import release_aside
release_aside()
lock = threading.Lock()
def finish(term):
    with lock:
        say("ended")
session = doyen.connect_blocking(STORE, **OPTIONS).open()
session.candidate("e", on_elected=lambda term: say("leading"), on_lost=finish).open()
while True:
    with lock:
        time.sleep(0.05)
    time.sleep(0.01)
"""
"""What is to be finished waits for a lock of the main thread."""


SHARDS = """
async def body(term):
    say("leading")
    await asyncio.sleep(60)
async def main():
    async with doyen.connect(STORE, stop_budget_s=60, **{**OPTIONS, "ttl_s": 600}) as session:
        await session.shards("jobs").configure(count=1)
        async with session.own_shards("jobs", body, name="a"):
            await asyncio.sleep(60)
asyncio.run(main())
"""


def start(program: str, store: str, audit: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, store, str(audit), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "leading\n":
        process.kill()
        raise AssertionError(process.communicate(timeout=WITHIN_S)[1])
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
    return process.returncode, out, err


def events(audit: Path) -> list[str]:
    return [json.loads(line)["event"] for line in audit.read_text().splitlines()]


@pytest.mark.parametrize(
    ("program", "event"),
    [
        pytest.param(BLOCKING, "resigned", id="blocking"),
        pytest.param(BUSY, "resigned", id="busy"),
        pytest.param(ASYNCIO, "resigned", id="asyncio"),
        pytest.param(STUCK_LOOP, "resigned", id="stuck loop"),
        pytest.param(THREADS, "lost", id="threads"),
        pytest.param(CALLBACKS, "lost", id="callbacks"),
        pytest.param(SCHEDULER, "lost", id="scheduler"),
    ],
)
def test_sigterm_releases_and_then_ends_the_process(
    program: str, event: str, store: str, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    process = start(program, store, audit)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == -signal.SIGTERM
    assert "ended" in out if event == "lost" else not err
    assert "event=" not in err  # a planned stop is no warning
    assert event in events(audit)


def test_shards_on_the_loop_of_the_main_thread_are_not_waited_for(
    store: str, tmp_path: Path
) -> None:
    """Their bodies are suspended with the loop. The stop budget would be longer than the test."""
    process = start(SHARDS, store, tmp_path / "audit.jsonl")
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == -signal.SIGTERM
    assert "event=" not in err


@pytest.mark.parametrize("program", [BLOCKING, ASYNCIO, THREADS], ids=["main", "loop", "thread"])
def test_the_successor_need_not_wait_for_the_lease(
    program: str, redis: servers.Redis, tmp_path: Path
) -> None:
    """The lease would live for a minute, and this store does not notice the death of a process."""
    url = f"{redis.url}?prefix=lifetime{os.getpid()}"

    def handover_s() -> float:
        process = start(program, url, tmp_path / "audit.jsonl")
        with doyen.connect_blocking(url, ttl_s=60) as session:
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            with session.campaign("e", wait_s=WITHIN_S):
                took_s = time.monotonic() - began
            assert ended(process)[0] == -signal.SIGTERM
        return took_s

    promptly(handover_s, 1.0)


UNCLOSED = """
session = doyen.connect_blocking(STORE, **OPTIONS).open()
session.campaign("e").__enter__()
say("leading")
"""
UNCLOSED_LOOP = """
async def main():
    session = await doyen.connect(STORE, **OPTIONS).open()
    await session.campaign("e").__aenter__()
    say("leading")
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
"""


@pytest.mark.parametrize("program", [UNCLOSED, UNCLOSED_LOOP], ids=["blocking", "asyncio"])
def test_a_session_that_nobody_closed_is_released_at_exit(
    program: str, store: str, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    code, _, err = ended(start(program, store, audit))
    assert (code, err) == (0, "")
    assert events(audit)[-1] == "resigned"


HANDLED = """
def handler(*_):
    say("handled")
    os._exit(3)
signal.signal(signal.SIGTERM, handler)
"""


@pytest.mark.parametrize(
    "program",
    [
        HANDLED + BLOCKING,
        BLOCKING.replace('    say("leading")', f'    exec({HANDLED!r})\n    say("leading")'),
        HANDLED + ASYNCIO,
    ],
    ids=["before", "after", "asyncio"],
)
def test_a_handler_of_the_users_is_kept(program: str, store: str, tmp_path: Path) -> None:
    process = start(program, store, tmp_path / "audit.jsonl")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, out) == (3, "handled\n"), err


def test_sigterm_stays_ignored(store: str, tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BLOCKING
    program = program.replace("rest()", "sys.stdin.readline()")
    program = program.replace('say("leading")', 'say("leading"); os.kill(os.getpid(), 15)')
    process = start(program, store, tmp_path / "audit.jsonl")
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL


FORKED = """
session = doyen.connect_blocking(STORE, **OPTIONS).open()
session.campaign("e").__enter__()
child = os.fork()
if not child:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    HOW
assert os.waitpid(child, 0)[1] == STATUS
assert session.leader("e") is not None
say("leading")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("sys.exit(0)", "0"), ("os.kill(os.getpid(), signal.SIGTERM); rest()", "15")],
    ids=["exit", "sigterm"],
)
def test_a_forked_child_releases_nothing(how: str, status: str, store: str, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    process = start(FORKED.replace("HOW", how).replace("STATUS", status), store, audit)
    assert ended(process)[0] == 0
    assert "resigned" not in events(audit)


def test_a_session_may_be_left_out(store: str, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    program = "OPTIONS['release_at_exit'] = False\n" + BLOCKING
    process = start(program, store, audit)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    assert events(audit)[-1] == "elected"


def test_the_default_is_restored_with_the_last_session(store: str) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        first = doyen.connect_blocking(store).open()
        second = doyen.connect_blocking(store).open()
        assert signal.getsignal(signal.SIGTERM) is lifetime._terminate
        first.close()
        assert signal.getsignal(signal.SIGTERM) is lifetime._terminate
        second.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


STUCK_THREAD = THREADS.replace("term.wait_lost()", "rest()")


def test_a_thread_that_does_not_end_keeps_its_lease(store: str, tmp_path: Path) -> None:
    """Its lease expires; to revoke it would let a successor begin while the body still runs."""
    audit = tmp_path / "audit.jsonl"
    program = STUCK_THREAD.replace("OPTIONS)", "OPTIONS | dict(ttl_s=3, stop_budget_s=0.3))")
    process = start(program, store, audit)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    assert "overrun" in events(audit)


def test_a_session_that_is_left_out_is_not_released_with_another(
    store: str, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    program = (
        "other = doyen.connect_blocking(STORE).open()\n"
        "OPTIONS['release_at_exit'] = False\n" + BLOCKING
    )
    process = start(program, store, audit)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    assert events(audit)[-1] == "elected"


SUPERVISED = """
import json
from doyen.supervise import Supervisor
COMMAND = json.loads(sys.argv[3])
async def main():
    async with (
        Supervisor(COMMAND) as supervisor,
        doyen.connect(STORE, ttl_s=30, stop_budget_s=0.8) as session,
        session.campaign("e") as term,
    ):
        say("leading")
        await supervisor.run(term)
"""
RUNNER = SUPERVISED + "asyncio.run(main())\n"
BARE_LOOP = SUPERVISED + "asyncio.new_event_loop().run_until_complete(main())\n"
IN_THE_TASK = (
    SUPERVISED.replace(
        "        await supervisor.run(term)",
        "        running = asyncio.create_task(supervisor.run(term))\n"
        "        signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "        await asyncio.sleep(0)\n"
        "        rest()",
    )
    + "asyncio.run(main())\n"
)


@pytest.mark.parametrize(
    ("program", "signals"),
    [
        pytest.param(RUNNER, [signal.SIGTERM], id="SIGTERM"),
        pytest.param(RUNNER, [signal.SIGINT] * 2, id="two SIGINT"),
        pytest.param(RUNNER, [signal.SIGINT] * 3, id="three SIGINT"),
        pytest.param(BARE_LOOP, [signal.SIGINT], id="a loop that is left"),
        pytest.param(IN_THE_TASK, [signal.SIGINT], id="a body that is left"),
    ],
)
def test_a_successor_waits_for_the_command_of_a_process_that_ends(
    program: str, signals: list[signal.Signals], store: str, tmp_path: Path
) -> None:
    """The command ignores SIGTERM, so that the guard has to kill it after its grace."""
    work = Stamps(tmp_path / "stamps")
    process = start(program, store, Path(), json.dumps(work.command))
    try:
        until(work.all_write, "the command runs")
        with doyen.connect_blocking(store, ttl_s=30) as session:
            for signum in signals:
                if process.poll() is None:
                    process.send_signal(signum)
                    sent_at = boot_time()  # signals that arrive together count once
                    until(lambda: boot_time() > sent_at + 0.02, "it has been handled")  # noqa: B023
            with session.campaign("e", wait_s=WITHIN_S):
                led_at = boot_time()
        process.wait(WITHIN_S)
        assert work.last() < led_at
    finally:
        process.kill()
        work.kill()
        process.communicate()


WORKER = """
import struct
from concurrent.futures import ThreadPoolExecutor
def work(term, path):
    say("leading")
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    left = 50
    while left:
        left -= not term.valid  # it takes a while to end
        os.pwrite(file, struct.pack("<d", time.clock_gettime(time.CLOCK_BOOTTIME)), 0)
        time.sleep(0.001)
    os.close(file)
    os.rename(path, path + ".ended")
"""
TO_THREAD = (
    WORKER
    + """
async def main():
    async with doyen.connect(STORE, ttl_s=60, stop_budget_s=10) as session:
        async with session.campaign("e") as term:
            await asyncio.to_thread(int)  # leaves an idle thread behind
            await asyncio.to_thread(work, term, sys.argv[3])
asyncio.run(main())
"""
)
POOL = (
    WORKER
    + """
with doyen.connect_blocking(STORE, ttl_s=60, stop_budget_s=10) as session:
    with session.campaign("e") as term, ThreadPoolExecutor() as pool:
        pool.submit(work, term, sys.argv[3])
        rest()
"""
)


@pytest.mark.parametrize("program", [TO_THREAD, POOL], ids=["to_thread", "pool"])
def test_a_successor_waits_for_what_a_body_does_in_a_pool_of_threads(
    program: str, store: str, tmp_path: Path
) -> None:
    stamp = tmp_path / "stamp"
    process = start(program, store, Path(), str(stamp))
    try:
        until(lambda: stamp.exists() and stamp.stat().st_size == 8, "the body works")
        with doyen.connect_blocking(store, ttl_s=60) as session:
            process.send_signal(signal.SIGTERM)
            began = boot_time()
            with session.campaign("e", wait_s=WITHIN_S):
                led_at = boot_time()
        assert process.wait(WITHIN_S) == -signal.SIGTERM
        last = tmp_path / "stamp.ended"
        assert began < struct.unpack("<d", last.read_bytes())[0] < led_at
    finally:
        process.kill()
        process.communicate()


@virtual
async def test_a_record_stays_until_the_processes_of_its_term_are_gone(place: Place) -> None:
    first, second = await place.open(), await place.open()
    async with first.campaign("e", name="first") as term:
        runs = [term._run_begins(), term._run_begins()]
    assert not term.valid
    waiting = asyncio.create_task(second.campaign("e", name="second").__aenter__())
    for run in runs:
        await asyncio.sleep(3 * TTL_S)
        assert place.holder() == "first"
        term._run_ended(run)
    assert (await asyncio.wait_for(waiting, 0.1)).valid


@virtual
async def test_a_lease_is_not_revoked_while_a_process_of_its_term_may_live(place: Place) -> None:
    """Neither by the end of the process, nor by closing the session."""
    first, second = await place.open(), await place.open()
    lock = first.lock("l")
    term = await lock.acquire()
    run, began = term._run_begins(), now()
    core_of(first).leases.bodies_suspended(ended=True)
    await first.close()
    assert not term.valid
    async with second.lock("l"):
        assert now() - began > STOP_BUDGET_S
    term._run_ended(run)
    with pytest.raises(doyen.LeadershipLost, match="closed"):
        await lock.release()


def test_threads_of_pools_are_known_to_be_at_work_or_idle() -> None:
    def idle() -> bool:
        return not lifetime.pools_at_work()

    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(WITHIN_S)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(int).result()
            until(idle, "the pool is idle")
            pool.submit(work)
            pool.submit(int)  # waits its turn
            assert began.wait(WITHIN_S)
            assert lifetime.pools_at_work()
            go_on.set()
            until(idle, "the pool is idle")
            began.clear()
            go_on.clear()

    async def with_anyio() -> None:
        await anyio.to_thread.run_sync(int)
        until(idle, "the pool is idle")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, work)
            await anyio.to_thread.run_sync(began.wait)
            assert lifetime.pools_at_work()
            go_on.set()
        until(idle, "the pool is idle")

    anyio.run(with_anyio)
