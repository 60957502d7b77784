"""doyen's log lines reach the handlers of `logging` as if they had been logged in place: from a
thread, so that a stuck handler costs no lease, but once, in order, and whatever handlers do."""

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
    """Keeps the messages; raises on those that say so."""

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
    """One that drops what it has seen before would drop everything if it were asked twice."""
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
    """While one runtime is being closed, the next session may have started another."""
    monkeypatch.setattr(ThreadRuntime, "_shared", None)
    other = ThreadRuntime.acquire()
    try:
        log.warning("one")
        until_blocking(lambda: bool(kept.messages))
    finally:
        other.release()
    assert kept.messages == ["one"]


def test_a_handler_may_close_the_last_session(kept: Kept) -> None:
    """It runs on the thread that is to be ended."""
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
    """The interpreter is shutting down, or there are as many threads as there may be."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log.warning("in place")
    assert kept.messages == ["in place"]
