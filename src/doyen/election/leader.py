"""Leading: one term, from the creation of the record to the end of the body.

- The leader watches its record. If the record is gone, or is another's, the term is lost.
- The loss of the lease ends the term at once, on whatever thread declared it lost.
- An order is obeyed, never enforced: the leader ends its own term, and its record is deleted when
  its body has ended, not before.
- What the record shows can be replaced (`publish`); its token and its lease stay.
- A body that has not ended within its stop budget after a loss is an overrun.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from doyen.election.attempt import Attempt
from doyen.election.handover import order_to_obey, successor_key
from doyen.election.options import meta_of
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable
from doyen.events import Elected, Event, Lost, Overrun, Resigned
from doyen.events.log_lines import log_line
from doyen.events.reasons import REMOVED, ordered
from doyen.model import Entry, Meta, PastTerm, TermEnd
from doyen.term import Term, TermState

__all__ = ["Leading"]

log = logging.getLogger("doyen")

OVERRUN_EXIT_CODE = 70
EXIT_FLUSH_S = 0.05
"""How long a process that exits for an overrun waits for each of its sinks, and for its log."""
LOOK_AFTER_S = 0.005
"""When a leader first reads its record, counted from its election."""


class Leading:
    """The state of an attempt that leads."""

    __slots__ = (
        *("_body_ended", "_looking", "_order_reason", "_publishing", "_since"),
        *("attempt", "successor", "term"),
    )

    def __init__(
        self,
        attempt: Attempt,
        record: Entry,
        *,
        make_term: Callable[..., Term] = Term,
        watched: bool = True,
    ) -> None:
        """Begin the term. Raises `LeaseGone` if the lease has expired meanwhile.

        With `watched` false the caller looks after the record, and there are no orders.
        """
        core, settings, keepalive = attempt.core, attempt.settings, attempt.keepalive
        if keepalive.lose_if_expired():
            raise LeaseGone("the lease expired while the record was being created")
        self.attempt = attempt
        self._looking = False
        self._body_ended = False
        self._order_reason = ""
        """The reason of the loss, if it is an order or the member is not eligible."""
        self.successor = ""
        """After an order in favour of another: the key of an entry of the successor, which is bound
        to the successor's lease."""
        self.term = make_term(
            election=settings.election,
            kind=settings.kind,
            slot=attempt.slot,
            name=settings.name,
            meta=settings.meta,
            token=record.revision,
            keepalive=keepalive,
            clock=core.runtime.clock,
            publisher=self,
        )
        self._publishing: asyncio.Lock | None = None
        keepalive.progress()
        self._since = core.runtime.clock.wall()
        self._emit(Elected, valid_until=keepalive.valid_until)
        self.term.on_end(self._term_ended)
        keepalive.forget(attempt)  # a leader waits for nothing, so a loss need not wake it
        keepalive.bind(self.term)
        core.leases.body_begins(keepalive)
        if settings.member is not None:
            settings.member.on_eligibility(self, self._check_eligibility)
            self._check_eligibility()
        asyncio.get_running_loop().call_soon(self._note_beginning)
        if not watched:
            return
        # Changes of the record between its creation and this line were not noticed, so the record
        # is read once, and watched from then on. The body begins before that.
        attempt.on_change = self._changed
        asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._changed)

    def _emit(self, event: Callable[..., Event], planned: bool = False, **fields: object) -> None:
        """Emit an event of this term. `fields` are those that only this kind of event has."""
        made = partial(self._event, event, **fields)
        self.attempt.core.telemetry.emit(made, planned=planned)

    def _event(self, event: Callable[..., Event], **fields: object) -> Event:
        identity = {**self.attempt.settings.identity, "election": self.attempt.label}
        token, lease = self.term.token, self.attempt.keepalive.lease.id
        return event(**identity, token=token, lease=lease, **fields)

    def _note_term(self, until: float | None = None, end: TermEnd = "", reason: str = "") -> None:
        """Note the term in the trail of the election."""
        settings, token = self.attempt.settings, self.term.token
        if settings.kind == "elections" and settings.trail:
            past = PastTerm(settings.name, token, self._since, until, end, reason)
            self.attempt.core.trail.note(settings.election, past)

    def _note_beginning(self) -> None:
        if self.term.state in (TermState.LEADER, TermState.UNSURE):  # else its end was noted
            self._note_term()

    def _note_end(self, ended_at: float, end: TermEnd, reason: str = "") -> None:
        clock = self.attempt.core.runtime.clock
        # Minus infinity stands for a time that had passed when the term began.
        until = clock.wall() - max(0.0, clock.now() - max(ended_at, 0.0))
        self._note_term(max(until, self._since), end, reason)

    def _changed(self) -> None:
        """The record, or an order below it, has changed."""
        self.attempt.wakeup.wake()
        if not self._body_ended and not self._looking:
            self._looking = True
            self.attempt.core.tasks.start(self._look())

    def _check_eligibility(self) -> None:
        """Resign, as after an order, if the member must not lead."""
        member = self.attempt.settings.member
        if member is not None and member.ineligible_because and not self._body_ended:
            self._order_reason = member.ineligible_because
            self.term._lose(self._order_reason)

    async def _look(self) -> None:
        """End the term if the record is gone or an order demands it."""
        attempt, term = self.attempt, self.term
        try:
            while term.valid:
                attempt.wakeup.woken = False
                try:
                    await attempt.watch_record()
                    record, order = await asyncio.gather(
                        attempt.get(attempt.record_key), order_to_obey(attempt, term)
                    )
                    if attempt.markers:
                        await attempt.remove_markers()
                except Exception as error:
                    if not isinstance(error, StoreError):
                        line = log_line(event="record_unread", term=term, effect="it is retried")
                        log.exception("%s", line)
                    await asyncio.sleep(attempt.core.calls.retry_pause())
                    continue
                if record is None or record.revision != term.token:
                    term._lose(REMOVED)
                elif order is not None:
                    if order.successor:
                        self.successor = successor_key(attempt, order)
                    self.resign(ordered(order.by, transfer=bool(order.successor)))
                elif not attempt.wakeup.woken:
                    break
        finally:
            self._looking = False

    async def publish(self, meta: Meta) -> None:
        """Replace the meta in the record. On the caller's loop."""
        core, work = self.attempt.core, self._publication(meta)
        core.check_open()
        await core.runtime.do(core.run(work))

    def publish_blocking(self, meta: Meta) -> None:
        """The same on the caller's thread."""
        core, work = self.attempt.core, self._publication(meta)
        core.check_open()
        core.thread.do_blocking(core.run(work))

    def _publication(self, meta: Meta) -> Callable[[], Coroutine[Any, Any, None]]:
        """Check what is to be published, before anything is sent."""
        meta = meta_of(meta)
        return partial(self._publish, meta, self.attempt.record_value(meta))

    async def _publish(self, meta: Meta, value: bytes) -> None:
        attempt, term = self.attempt, self.term
        if self._publishing is None:
            self._publishing = asyncio.Lock()
        async with self._publishing:
            while True:
                term.check()
                try:
                    if await attempt.update_record(value):
                        term.meta = meta
                        return
                except (StoreUnavailable, OutcomeUnknown):
                    await asyncio.sleep(attempt.core.calls.retry_pause())
                else:
                    term._lose(REMOVED)

    def resign(self, reason: str) -> None:
        """End the term as ordered. The record is deleted when the body has ended."""
        self._order_reason = reason
        self.term._lose(reason)

    def _term_ended(self) -> None:
        """Any thread. `body_ended` handles a term whose body ended first."""
        if self.term.state is TermState.LOST:
            self.attempt.core.runtime.post(self._term_lost)

    def _term_lost(self) -> None:
        term, keepalive = self.term, self.attempt.keepalive
        planned = term.reason == self._order_reason or (
            keepalive.loss_planned and term.reason == keepalive.lost_because
        )
        self._emit(Lost, planned, reason=term.reason, ended_at=term.ended_at)
        self._note_end(term.ended_at, "lost", term.reason)
        if not self._body_ended:
            now = self.attempt.core.runtime.clock.now()
            left_s = term.ended_at + term.stop_budget_s - now
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._overrun)

    def _overrun(self) -> None:
        if self._body_ended:
            return
        self._emit(Overrun)
        core = self.attempt.core
        if self.attempt.settings.on_overrun == "exit":
            core.telemetry.flush(EXIT_FLUSH_S)
            core.runtime.flush_log(EXIT_FLUSH_S)
            os._exit(OVERRUN_EXIT_CODE)

    @property
    def supervises(self) -> bool:
        """Whether processes that the body has started through a supervisor may be alive. They are
        part of the body."""
        return self.term in self.attempt.keepalive.runs

    async def without_processes(self) -> None:
        """Wait until none of these processes is alive."""
        await self.attempt.keepalive.runs.wait_for_end(self.term)

    def body_ended(self) -> None:
        """The passage to leaving: the body has ended, so the record may be deleted."""
        attempt = self.attempt
        if self._body_ended:
            return
        self._body_ended = True
        if self.term._conclude():
            self._emit(Resigned)
            now = attempt.core.runtime.clock.now()
            # When the deletion of the record is under way, which begins in the next turn. A session
            # that is closed now has its trail written later still.
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(self._note_end, now, "resigned"))
        attempt.keepalive.forget(self.term)
        if attempt.settings.member is not None:
            attempt.settings.member.forget(self)
        attempt.on_change = attempt.wakeup.wake
        attempt.core.leases.body_ended(attempt.keepalive)
