"""A program that runs on the main thread while its process leads.

    lead(lambda: doyen.connect_blocking(URL), "billing", main)

For programs that know nothing of terms: commands of Django, Click and Typer. The rules:

- The program is called when the process is elected. When it returns, the process resigns.
- When the term ends first, the program is interrupted wherever it is, as by Ctrl-C: a handler that
  it installed for SIGTERM is called; without one, `Interrupted` is raised, which `except Exception`
  does not catch. No other candidate is elected before it has ended. A program that does not end
  within the stop budget is ended with its process (`on_overrun="exit"`). Then the process campaigns
  again.
- SIGTERM interrupts it in the same way. The process resigns when the program has ended, and exits
  with code 143. While it waits to be elected, it just leaves the line. A second SIGTERM ends it at
  once. A handler that was there before is kept, and called instead.

The interrupt is the signal SIGURG, which is ignored by default and is sent to the main thread only,
so that it also ends a wait for the network or a lock. On other threads nothing is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack, cast

from doyen.blocking import BlockingSession
from doyen.election.candidate import entered_campaigns
from doyen.election.options import CampaignOptions, CampaignSettings
from doyen.errors import LeadershipLost
from doyen.lease.lifetime import ends_process
from doyen.term import Term, TermState

__all__ = ["Interrupted", "current_term", "lead"]

T = TypeVar("T")
TERMINATED = 128 + signal.SIGTERM
NOT_LEADING = 75
"""EX_TEMPFAIL: the exit code after a loss, if it is not caught."""


class Interrupted(SystemExit):
    """Raised in a program that has to stop. Let it pass: the process goes on to campaign."""


def current_term() -> Term:
    """The term in which the calling code runs; for its token. Raises `LeadershipLost` if there is
    none.

        invoice.pay(fencing_token=current_term().token)
    """
    entered = entered_campaigns.get()
    if not entered:
        raise LeadershipLost("this code does not run as a leader: there is no term")
    return entered[-1].term


def lead(
    connect: Callable[[], BlockingSession],
    election: str,
    program: Callable[[Term], T],
    *,
    once: bool = False,
    **options: Unpack[CampaignOptions],
) -> T:
    """Run `program` as leader, and return what it returned.

    After a loss it is run again in the next term; with `once`, `LeadershipLost` is raised instead.
    Options are those of `Session.campaign`. Here, `on_overrun` is "exit" by default.
    """
    options = {"on_overrun": "exit", **options}
    CampaignSettings.of(election, options)  # mistakes are reported before connecting
    with _Interrupts() as interrupts, connect() as session:
        for campaign in session.campaigns(election, **options):
            result: T | None = None
            with campaign as term, interrupts.leading(term):
                result = program(term)
            interrupts.check()
            if term.state is TermState.ENDED:
                return cast("T", result)
            if once:
                raise term.loss()
        raise AssertionError("campaigns never end")


class _Interrupts:
    """The signal handlers of one program. A signal interrupts the program, and the wait to be
    elected, but never the release of the term."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._main = threading.current_thread() is threading.main_thread()
        self._previous: dict[int, Any] = {}
        self._interruptible = True
        self._terminated = False
        self._term: Term | None = None
        self._lock = threading.Lock()
        """Held to send the signal, so that none is sent after the program has ended."""

    def __enter__(self) -> _Interrupts:
        if self._main:
            self._previous[signal.SIGURG] = signal.signal(signal.SIGURG, self._on_loss)
            # A handler of the user's is kept.
            if ends_process(signal.getsignal(signal.SIGTERM)):
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Exit if SIGTERM has come. From now on it interrupts again."""
        self._interruptible = True
        if self._terminated:
            raise Interrupted(TERMINATED)

    @contextlib.contextmanager
    def leading(self, term: Term) -> Iterator[None]:
        """Interrupt what is done in this context when the term ends."""
        self._term = term
        term.on_end(self._lost)
        try:
            yield
        except Interrupted:
            if self._terminated or not self._main:
                raise
        finally:
            self._interruptible = False
            with self._lock:
                self._term = None
            term._forget(self._lost)
            if signal.SIGTERM in self._previous:  # the program may have left a handler of its own
                signal.signal(signal.SIGTERM, self._on_sigterm)

    def _lost(self) -> None:
        """The term has ended. Any thread."""
        with self._lock:
            if self._main and self._term is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _on_loss(self, signum: int, frame: object) -> None:
        term = self._term
        if term is None or term.valid or not self._interruptible:
            return  # from another sender, or too late
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and handler != self._on_sigterm:
            signal.raise_signal(signal.SIGTERM)  # the program knows how to stop
        else:
            self._interruptible = False
            raise Interrupted(NOT_LEADING)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        if self._terminated or os.getpid() != self._pid:  # the second one, or in a forked child
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self._terminated = True
        if self._interruptible:
            self._interruptible = False
            raise Interrupted(TERMINATED)
