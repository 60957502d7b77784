"""Sessions are released when the process ends, at exit and on SIGTERM, not in a forked child; and a
handler of the user's is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import doyen
import servers
from doyen.lease import lifetime

WITHIN_S = 30.0
PRELUDE = """
import asyncio, os, signal, sys, threading, time
import doyen
STORE, AUDIT = sys.argv[1:3]
OPTIONS = dict(ttl_s=60, audit=AUDIT)
def say(text):
    print(text, flush=True)
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


SHARDS = """
async def body(term):
    say("leading")
    await asyncio.sleep(60)
async def main():
    async with doyen.connect(STORE, **OPTIONS) as session:
        await session.shards("jobs").configure(count=1)
        async with session.own_shards("jobs", body, name="a"):
            await asyncio.sleep(60)
asyncio.run(main())
"""


def start(program: str, store: str, audit: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, store, str(audit)],
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
    assert event in events(audit)


def test_shards_on_the_loop_of_the_main_thread_are_not_waited_for(
    store: str, tmp_path: Path
) -> None:
    """Their bodies are suspended with the loop. The stop budget would be ten seconds."""
    process = start(SHARDS, store, tmp_path / "audit.jsonl")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    assert time.monotonic() - began < 8.0


@pytest.mark.parametrize("program", [BLOCKING, ASYNCIO, THREADS], ids=["main", "loop", "thread"])
def test_the_successor_need_not_wait_for_the_lease(
    program: str, redis: servers.Redis, tmp_path: Path
) -> None:
    """The lease would live for a minute, and this store does not notice the death of a process."""
    url = f"{redis.url}?prefix=lifetime{os.getpid()}"
    process = start(program, url, tmp_path / "audit.jsonl")
    with doyen.connect_blocking(url, ttl_s=60) as session:
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with session.campaign("e", wait_s=WITHIN_S):
            took_s = time.monotonic() - began
        assert ended(process)[0] == -signal.SIGTERM
    assert took_s < 1.0


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
    assert ended(process)[:2] == (3, "handled\n")


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
