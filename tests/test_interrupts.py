"""Handlers of signals that raise, or use doyen, at chosen instants of doyen's own code."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from types import CodeType, FrameType
from typing import Any

import pytest

import doyen
from doyen._waiting import LoopCalls
from doyen.blocking import BlockingSession
from doyen.lease.runtime import Outcome, ThreadRuntime
from doyen.model import Claim, line_key
from doyen.stores.sqlite.forks import Connections
from support import core_of, until_blocking

names = (f"memory://interrupts-{number}" for number in count())


@pytest.fixture
def url() -> str:
    return next(names)


def line_of(function: Callable[..., object], text: str) -> int:
    """The number of the first line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


@contextmanager
def interrupted(
    function: Callable[..., object], text: str, handler: Callable[[], None]
) -> Iterator[None]:
    """Call `handler` once, when this thread is about to execute the line of `function` that
    contains `text`."""
    code: CodeType = inspect.unwrap(function).__code__
    line, called = line_of(function, text), False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal called
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line and not called:
            called = True
            sys.settrace(None)
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        assert called


def _ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where", ["made = self._made", "if self._woken_for", "self._woken_for = made"]
)
def test_a_campaign_that_is_interrupted_while_it_is_begun_leaves_no_ticket(
    url: str, where: str
) -> None:
    with (
        doyen.connect_blocking(url, ttl_s=2) as session,
        doyen.connect_blocking(url, ttl_s=2) as other,
    ):
        runtime, core = session._runtime, core_of(session)
        with other.campaign("e", name="leader"):
            campaign = session.campaign("e", name="interrupted")
            with pytest.raises(KeyboardInterrupt), interrupted(LoopCalls.put, where, _ctrl_c):
                campaign.__enter__()

            async def others_begun() -> None:
                pass

            runtime.finish_blocking(others_begun())
            until_blocking(lambda: not core._callers)
            tickets = runtime.do_blocking(core.store.list(line_key("e")))
            assert [Claim.decode(ticket.value).name for ticket in tickets] == ["leader"]
        with other.campaign("e", name="next", wait_s=10) as term:
            assert term.valid


def test_a_candidate_whose_loop_is_closed_does_not_lead(url: str) -> None:
    """The loop is closed with the task pending, as old programs do without `asyncio.run`."""

    async def candidate(session: doyen.Session) -> None:
        async with session.campaign("e", name="gone"):
            pytest.fail("entered on a closed loop")

    with doyen.connect_blocking(url, ttl_s=2) as other:
        with other.campaign("e", name="leader"):
            loop = asyncio.new_event_loop()
            session = loop.run_until_complete(doyen.connect(url, ttl_s=2).open())
            task = loop.create_task(candidate(session))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            while len(other.line("e")) < 2:
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        with other.campaign("e", name="next", wait_s=10) as term:
            assert term.valid
        asyncio.run(session.close())
        task.get_coro().close()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_call_put_between_the_last_turn_of_the_loop_and_its_closing_is_refused(
    url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the last session meanwhile. The call would wait without end."""
    session = doyen.connect_blocking(url, ttl_s=2).open()
    runtime, core = session._runtime, core_of(session)
    work = core.run(lambda: core.store.get("k"))
    refused: list[Future[object]] = []
    join = runtime._thread.join

    async def do() -> object:
        return await asyncio.wait_for(runtime.do(work), 10)

    def call() -> object:
        return runtime.submit(work).result(10) if kind == "blocking" else asyncio.run(do())

    def join_and_call(timeout: float | None = None) -> None:
        join(timeout)
        refused.append(pool.submit(call))
        until_blocking(lambda: runtime._calls._waiting)

    monkeypatch.setattr(runtime._thread, "join", join_and_call)
    with ThreadPoolExecutor(1) as pool:
        session.close()
        with pytest.raises(doyen.SessionClosed, match="connect again"):
            refused[0].result(20)
    with pytest.raises(doyen.SessionClosed, match="connect again"):
        runtime.do_blocking(core.run(lambda: core.store.get("k")))
    runtime.start(core.run(lambda: core.store.get("k")))


def test_work_that_the_end_of_the_loop_cancels_ends_in_session_closed() -> None:
    runtime = ThreadRuntime.acquire()

    async def work() -> None:
        await asyncio.Event().wait()

    waiting = runtime.submit(work())
    runtime.release()
    with pytest.raises(doyen.SessionClosed, match="connect again"):
        waiting.result(10)


def test_a_closed_loop_refuses_a_call_and_leaves_those_of_others_to_be_refused() -> None:
    loop = asyncio.new_event_loop()
    calls, made = LoopCalls(loop), [0]
    calls.put(made.clear)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.put(made.sort)
    assert [*calls.taken()] == [made.clear]


@pytest.mark.parametrize(
    "where",
    [
        "if self._closings:",
        "closing = self._runtime.submit",
        "self._closings.append",
        "self._closings[:1]",
        "untrack(core)",
        "self._runtime.release()",
    ],
)
def test_a_handler_may_close_a_session_that_is_being_closed(url: str, where: str) -> None:
    session = doyen.connect_blocking(url, ttl_s=2).open()
    with interrupted(BlockingSession.close, where, session.close):
        session.close()
    session.close()
    assert not ThreadRuntime._shared


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (ThreadRuntime.retain, "if not self"),
        (ThreadRuntime._change_users, "users = self._users"),
        (ThreadRuntime._change_users, "changed = _Users"),
        (ThreadRuntime._change_users, "users.changed.append"),
        (ThreadRuntime._change_users, "if users.changed[0] is changed"),
        (ThreadRuntime._change_users, "return changed.number"),
    ],
)
def test_a_handler_may_close_the_session_while_a_campaign_is_entered(
    url: str, function: Callable[..., object], where: str
) -> None:
    session = doyen.connect_blocking(url, ttl_s=2).open()
    campaign = session.campaign("e")
    with (
        interrupted(function, where, session.close),
        pytest.raises(doyen.SessionClosed, match="connect again"),
    ):
        campaign.__enter__()
    assert not ThreadRuntime._shared


@pytest.mark.parametrize(
    "where", ["changed = _Users", "users.changed.append", "if users.changed[0]", "return changed"]
)
def test_users_of_two_threads_are_counted_whatever_the_order(where: str) -> None:
    runtime = ThreadRuntime.acquire()

    def of_another_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(runtime.retain).result(10)
            pool.submit(runtime.retain).result(10)
            pool.submit(runtime.release).result(10)

    with interrupted(ThreadRuntime._change_users, where, of_another_thread):
        runtime.retain()
    runtime.release()
    runtime.release()
    assert ThreadRuntime._shared == [runtime]
    runtime.release()
    assert not ThreadRuntime._shared
    with pytest.raises(doyen.SessionClosed, match="connect again"):
        runtime.retain()


@pytest.mark.parametrize("where", ["mine = cls()", "cls._shared.append", "return mine"])
def test_threads_that_start_a_runtime_at_the_same_time_use_the_same(where: str) -> None:
    others: list[ThreadRuntime] = []

    def of_another_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(ThreadRuntime.acquire).result(10))

    with interrupted(ThreadRuntime.acquire, where, of_another_thread):
        runtime = ThreadRuntime.acquire()
    assert ThreadRuntime._shared == [runtime] == others
    runtime.release()
    assert runtime._thread.is_alive()
    runtime.release()
    assert not runtime._thread.is_alive()
    assert not ThreadRuntime._shared


@pytest.mark.parametrize("where", ["if self._change_users", "self._forget()", "_watchdog.stop()"])
def test_a_runtime_that_is_being_stopped_is_not_used(where: str) -> None:
    runtime = ThreadRuntime.acquire()
    acquired: list[ThreadRuntime] = []
    with interrupted(
        ThreadRuntime.release, where, lambda: acquired.append(ThreadRuntime.acquire())
    ):
        runtime.release()

    async def work() -> str:
        return "done"

    assert acquired[0].do_blocking(work()) == "done"
    assert ThreadRuntime._shared == acquired
    acquired[0].release()
    assert not ThreadRuntime._shared


def test_a_thread_that_an_interrupted_cancellation_has_not_woken_is_woken_by_the_works_end() -> (
    None
):
    cancelled: list[None] = []
    outcome: Outcome[int] = Outcome(lambda: cancelled.append(None))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome.wait, 20)
        until_blocking(lambda: outcome._waiting)
        with (
            interrupted(Outcome.reach, "woken.release()", _ctrl_c),
            pytest.raises(KeyboardInterrupt),
        ):
            outcome.cancel()
        assert cancelled
        outcome.reach(None, CancelledError())  # on doyen's loop
        assert isinstance(waiting.result(10)[1], CancelledError)


def test_calls_that_a_call_leaves_behind_when_it_ends_the_loop_are_made_later() -> None:
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop)
    made: list[str] = []

    def exits() -> None:
        raise SystemExit

    async def a_few_turns() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    calls.put(exits)
    calls.put(lambda: made.append("reply"))
    task = loop.create_task(a_few_turns())
    with pytest.raises(SystemExit):
        loop.run_until_complete(task)
    assert not made
    loop.run_until_complete(task)
    assert made == ["reply"]
    loop.close()


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (Connections.before_fork, "with self._changed"),
        (Connections.before_fork, "self._changed.wait_for"),
        (Connections.after_fork, "with self._changed"),
        (Connections.after_fork, "self._forking.discard"),
        (Connections.after_fork, "notify_all"),
    ],
)
def test_sqlite_is_used_again_after_the_hooks_of_a_fork_were_interrupted(
    function: Callable[..., object], where: str
) -> None:
    connections = Connections()
    with interrupted(function, where, _ctrl_c):
        for hook in (connections.before_fork, connections.after_fork, connections.after_fork):
            with suppress(KeyboardInterrupt):  # as Python ignores it there
                hook()
    assert not connections.forking
    assert connections._changed.acquire(blocking=False)
    connections._changed.release()
