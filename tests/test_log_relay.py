"""doyen's log lines are passed to the handlers of `logging` by a thread, so that a stuck handler
delays no renewal. Each line arrives once and in order, and errors of handlers have no effect on
doyen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from doyen.lease.runtime import ThreadRuntime
from support import until_blocking

log = logging.getLogger("doyen")


@pytest.fixture
def runtime() -> Iterator[ThreadRuntime]:
    runtime = ThreadRuntime.acquire()
    yield runtime
    runtime.release()


class Kept(logging.Handler):
    """Keeps messages, and raises an exception on those that contain "raise"."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "raise" in record.getMessage():
            raise RuntimeError("this handler does not catch its own errors")
        self.messages.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_filter_of_the_user_sees_each_line_once(kept: Kept) -> None:
    """A filter that drops repeated lines would drop all lines if it were called twice."""
    seen: list[logging.LogRecord] = []

    def new(record: logging.LogRecord) -> bool:
        seen.append(record)
        return seen.count(record) == 1

    log.addFilter(new)
    try:
        runtime = ThreadRuntime.acquire()
        try:
            log.warning("one")
            runtime.flush_log(20.0)
        finally:
            runtime.release()
    finally:
        log.removeFilter(new)
    assert kept.messages == ["one"]


def test_a_handler_that_raises_ends_nothing(
    runtime: ThreadRuntime, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("raise")
    log.warning("after")
    runtime.flush_log(20.0)
    assert kept.messages == ["after"]
    assert "does not catch its own errors" in capsys.readouterr().err


def test_two_relays_at_once_hand_on_each_line_once(
    runtime: ThreadRuntime, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one runtime is closed, the next session may already have started another."""
    monkeypatch.setattr(ThreadRuntime, "_shared", [])
    other = ThreadRuntime.acquire()
    try:
        log.warning("one")
        until_blocking(lambda: bool(kept.messages))
    finally:
        other.release()
    assert kept.messages == ["one"]


def test_a_handler_may_close_the_last_session(kept: Kept) -> None:
    """The handler runs on the thread that this ends."""
    runtime, closed = ThreadRuntime.acquire(), threading.Event()

    class Closing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not closed.is_set():
                closed.set()
                runtime.release()

    closing = Closing()
    log.addHandler(closing)
    try:
        log.warning("close")
        log.warning("after")
        assert closed.wait(20.0)
        until_blocking(lambda: kept.messages == ["close", "after"])
        until_blocking(lambda: all(t.name != "doyen-log" for t in threading.enumerate()))
    finally:
        log.removeHandler(closing)


def test_levels_handlers_and_propagation_are_those_of_logging(
    runtime: ThreadRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "doyen")
    log.debug("below the level")
    log.info("told")
    logging.disable(logging.INFO)
    log.info("disabled")
    logging.disable(logging.NOTSET)
    runtime.flush_log(20.0)
    late = Kept()
    log.addHandler(late)
    logging.getLogger("doyen.nats").warning("from a child")
    runtime.flush_log(20.0)
    log.removeHandler(late)
    assert caplog.messages == ["told", "from a child"]
    assert late.messages == ["from a child"]
    log.propagate = False
    try:
        log.warning("kept here")
        runtime.flush_log(20.0)
    finally:
        log.propagate = True
    assert caplog.messages == ["told", "from a child"]


def test_without_a_thread_lines_are_logged_in_place(
    runtime: ThreadRuntime, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is shutting down, or the limit of threads is reached."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log.warning("in place")
    assert kept.messages == ["in place"]
