"""One candidate in one election, from standing in line to letting go.

The life of a leader, in keys: a ticket under the election's line; at the head of the line, the
creation of the leader record; the token is the revision of that creation. The leader keeps its
ticket; it lets go by deleting the record, then the ticket.

What makes it safe is one thing only: the record is created atomically, if absent, under a lease
that this process keeps alive and counts from the instant of sending. The line spares the store a
herd and keeps candidates in order; a mistake in it cannot make two leaders.

Rules kept here:

- An unknown outcome is not leadership. After one, only a read that shows this attempt's own id
  under this attempt's own lease proves it; what may still arrive late is looked for and removed.
- The record is deleted only after the body has ended, and only by its own version. A record or
  ticket of an attempt that has ended, which a failover of the store has brought back, is deleted by
  any candidate of the same session that comes to it, and by the session (`Presence.delete`).
- The holder watches its record and takes its absence for loss.
- Failing to win raises; nothing is ever entered unheld.
- An order is obeyed, never enforced: the holder ends its own term, and its record goes when its
  body has ended, not before. An heir is let in out of turn by those whose turn it is: while an
  order names it and it is ready, they leave the record to it, until it has had its chance.
- A leader removes orders that were meant for a term before its own: they are void, and would be in
  the way of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from doyen.election.options import CampaignSettings
from doyen.election.presence import Presence
from doyen.errors import (
    LeaseGone,
    NotElected,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    TicketGone,
)
from doyen.events import Elected, Hindered, Lost, Overrun, Resigned, Waiting
from doyen.lease.keepalive import Heart
from doyen.model import (
    Claim,
    Entry,
    Order,
    leader_key,
    line_key,
    mail_key,
    order_key,
    ready_key,
)
from doyen.stores.port import Watch
from doyen.term import Term, TermState

__all__ = ["Candidacy"]

T = TypeVar("T")
log = logging.getLogger("doyen")

OVERRUN_EXIT_CODE = 70
LAST_WORDS_S = 0.05
"""How long a process that ends for an overrun waits for each of its sinks, and for its log."""
LOOK_AFTER_S = 0.005
"""When a leader first looks at its record, counted from its election."""


class Candidacy:
    """Stands for election on a presence. Lives on doyen's loop."""

    __slots__ = (
        "_asked",
        "_attempt",
        "_behind",
        "_called",
        "_claimed",
        "_deferred",
        "_doubtful",
        "_entering",
        "_heart",
        "_heir",
        "_laid",
        "_left",
        "_looking",
        "_mailbox",
        "_presence",
        "_record",
        "_record_key",
        "_seen",
        "_term",
        "_ticket",
        "_trouble",
        "_unread",
        "_waiter",
        "_watch",
        "_woken",
    )

    def __init__(self, presence: Presence, asked: CampaignSettings) -> None:
        self._presence = presence
        self._asked = asked
        self._record_key = leader_key(asked.election, asked.kind)
        self._heart: Heart | None = None
        self._term: Term | None = None
        self._left = False
        self._entering = False
        self._looking = False
        self._behind = ""
        self._trouble: StoreError | None = None
        self._watch: Watch | None = None
        self._mailbox: Watch | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._seen: tuple[int, float] | None = None
        """The leader that this candidate would preempt, and since when it has known it."""
        self._heir = ""
        """As leader that hands over: the key of the heir's word, which lives as the heir does."""
        self._deferred: tuple[str, float] | None = None
        """The order for whose heir this candidate makes way, and until when."""
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._attempt = self._presence.next_attempt()
        self._ticket: Entry | None = None
        self._record: Entry | None = None
        self._doubtful = False
        self._claimed = False
        """A creation of the record was sent, and whether it failed is not known. It may have
        landed, or land while we wait in line: then everyone waits for us."""
        self._woken = False
        self._called = ""
        """As candidate: the lease of an order that names it heir, so that its turn is now."""
        self._unread = False
        self._laid: dict[str, None] = {}
        """Keys under which this attempt may have laid an order or its word to be ready."""

    async def win(self) -> Term:
        """Stand until elected. Raises `NotElected` after `wait_s`; leaves nothing behind then."""
        wait_s = self._asked.wait_s
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        try:
            await self._enter(deadline)
            while True:
                try:
                    return await self._stand(deadline)
                except LeaseGone as error:
                    self._trouble = error
                    if self._heart is not None:
                        self._heart.lose(str(error))
                except TicketGone as error:
                    # The attempt goes on: a record of its own may still be under way.
                    self._trouble = error
                    self._ticket = None
                except (StoreUnavailable, OutcomeUnknown) as error:
                    self._hindered(error)
                    await self._pause(deadline)
        except BaseException:
            self._let_go_in_background()
            raise
        finally:
            self._step_aside()

    def _hindered(self, error: StoreError) -> None:
        """Say what is in the way, once for each thing that is."""
        if str(error) != str(self._trouble):
            self._presence.telemetry.emit(
                Hindered(election=self._asked.election, name=self._asked.name, error=str(error))
            )
        self._trouble = error

    async def _enter(self, deadline: float | None) -> None:
        """Take turns with the session's other candidates until elected or waiting: thousands that
        come at once would only be in one another's way."""
        await self._in_time(self._presence.entrance.acquire(), deadline)
        self._entering = True

    async def _in_time(self, work: Awaitable[T], deadline: float | None) -> T:
        """Wait for one's turn, and for as long as a request may take after the deadline: to try
        once takes that."""
        if deadline is not None:
            deadline += self._presence.timing.request_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                return await work
        except TimeoutError:
            self._trouble = self._trouble or StoreUnavailable("the store is slow to answer others")
            raise await self._not_elected() from None

    def _step_aside(self) -> None:
        if self._entering:
            self._entering = False
            self._presence.entrance.release()

    async def _stand(self, deadline: float | None) -> Term:
        presence, store = self._presence, self._presence.store
        heart = await self._in_time(self._live_heart(), deadline)
        if heart is not self._heart:
            self._adopt(heart)
        if self._asked.recipe == "line" and self._ticket is None:
            self._ticket = await self._take_ticket(heart)
        while True:
            self._woken = False
            if heart.lost_because is not None:
                raise LeaseGone(heart.lost_because)
            if self._claimed:
                await self._watch_record()
                record = await presence.call(store.get(self._record_key))
                if record is not None and self._is_mine(record):
                    return self._begin_term(heart, record)
            await self._read_mail(heart)
            if not self._called:
                ahead, order = await asyncio.gather(self._ahead(), self._order())
                if ahead is not None:
                    await self._wait_behind(ahead, deadline)
                    continue
                if order is not None and await self._make_way(order, deadline):
                    continue
            claimed, self._claimed = self._claimed, True
            creation = await self._ask(store.create(self._record_key, self._claim(), heart.lease))
            if creation.won or self._is_mine(creation.entry):
                return self._begin_term(heart, creation.entry)
            self._claimed = claimed
            if self._watch is None:
                await self._watch_record()
                continue
            until = await self._claim_priority(heart, creation.entry)
            await self._wait(creation.entry, deadline, until)

    async def _ahead(self) -> Entry | None:
        if self._ticket is None:
            return None
        return await self._presence.call(self._presence.store.ahead(self._ticket))

    async def _order(self) -> Entry | None:
        return await self._get(order_key(self._asked.election, self._asked.kind))

    async def _get(self, key: str) -> Entry | None:
        return await self._presence.call(self._presence.store.get(key))

    async def _make_way(self, entry: Entry, deadline: float | None) -> bool:
        """At the head of the line, while an order names another as heir: wait for the leader to
        let go without trying the record, and then for the heir to take it, as long as a request
        may take. False if there is nobody to wait for."""
        order = Order.decode(entry.value)
        if order is None or not order.heir or order.rank is not None:
            return False
        await self._watch_record()
        record, ready = await asyncio.gather(
            self._get(self._record_key), self._get(self._ready_key(order.heir))
        )
        if record is not None:
            if record.revision == order.token:
                await self._wait(record, deadline)
            return record.revision == order.token
        if not _is_ready(ready, entry):
            return False
        now, lease = asyncio.get_running_loop().time(), entry.lease or ""
        if self._deferred is None or self._deferred[0] != lease:
            self._deferred = lease, now + self._presence.timing.request_timeout_s
        until = self._deferred[1]
        if now >= until:
            return False
        if not await self._sleep(min(until, _when(deadline))) and _when(deadline) <= until:
            raise await self._not_elected()
        return True

    async def _watch_record(self) -> None:
        """Be told of changes at the record and of orders, until the watches are dropped."""
        presence = self._presence
        if self._watch is None:
            watch = await presence.call(presence.store.watch(self._record_key, self._changed))
            if self._left or self._watch is not None:
                watch.close()  # nobody needs it any more, or another was quicker
            else:
                self._watch = watch

    async def _live_heart(self) -> Heart:
        stall_after_s = self._asked.stall_after_s
        if stall_after_s is None:
            return await self._presence.heart()
        if self._heart is not None and not self._heart.lose_if_expired():
            return self._heart
        return await self._presence.own_heart(stall_after_s)

    def _adopt(self, heart: Heart) -> None:
        if self._heart is not None:
            self._heart.forget(self)
            self._end_attempt(self._heart)
            self._begin_attempt()
        self._heart = heart
        heart.attempts.add(self._attempt)
        heart.on_loss(self, partial(self._heart_lost, heart))

    def _claim(self) -> bytes:
        asked = self._asked
        return Claim(asked.name, self._attempt, asked.meta, asked.priority).encode()

    def _is_mine(self, entry: Entry) -> bool:
        """Whether an entry is this attempt's own, under the lease that this attempt stands on."""
        return (
            self._heart is not None
            and entry.lease == self._heart.lease.id
            and Claim.decode(entry.value).attempt == self._attempt
        )

    async def _ask(self, request: Awaitable[T]) -> T:
        """A call that may leave something of ours behind, even if its answer is lost."""
        doubted, self._doubtful = self._doubtful, True
        try:
            answer = await self._presence.call(request)
        except (StoreUnavailable, LeaseGone):
            self._doubtful = doubted
            raise
        self._doubtful = doubted
        return answer

    def _ready_key(self, heir: str) -> str:
        return ready_key(self._asked.election, heir, self._asked.kind)

    async def _take_ticket(self, heart: Heart) -> Entry:
        presence, line = self._presence, self._line_key()
        if self._doubtful:
            for ticket in await presence.call(presence.store.list(line)):
                if self._is_mine(ticket):
                    return ticket
        return await self._ask(
            presence.store.enqueue(line, self._claim(), heart.lease, rank=self._asked.priority)
        )

    def _line_key(self) -> str:
        return line_key(self._asked.election, self._asked.kind)

    async def _wait_behind(self, ahead: Entry, deadline: float | None) -> None:
        """Wait for the ticket directly ahead to change. Nobody else's wakes us."""
        presence, store = self._presence, self._presence.store
        if self._is_mine(ahead):
            # An enqueue whose answer was lost has landed after all: waiting on it would be
            # waiting on ourselves.
            await presence.delete(ahead)
            return
        watch = await presence.call(store.watch(ahead.key, self._wake))
        try:
            if await presence.call(store.get(ahead.key)) is not None:
                await self._wait(ahead, deadline)
        finally:
            watch.close()

    async def _wait(
        self, behind: Entry, deadline: float | None, until: float | None = None
    ) -> None:
        """Wait to be woken, or until the time to look again by oneself."""
        asked = self._asked
        if await self._presence.delete_left_over(behind):
            return
        if self._mailbox is None and self._ticket is not None:
            key = mail_key(asked.election, self._attempt, asked.kind)
            self._mailbox = await self._presence.call(
                self._presence.store.watch(key, self._on_mail)
            )
            self._unread = True
            return
        name = Claim.decode(behind.value).name
        where = "leads" if behind.key == self._record_key else "is ahead in line"
        if self._behind != f"{name!r} {where}":
            self._behind = f"{name!r} {where}"
            self._presence.telemetry.emit(
                Waiting(election=asked.election, name=asked.name, behind=name)
            )
        self._trouble = None
        woken = await self._sleep(min(_when(deadline), _when(until)))
        if not woken and _when(deadline) <= _when(until):
            raise await self._not_elected()

    async def _sleep(self, until: float) -> bool:
        """Sleep until woken; False if the time came first."""
        if self._woken:
            return True
        self._step_aside()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await self._waiter
            return True
        except TimeoutError:
            return False
        finally:
            self._waiter = None

    def _wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _pause(self, deadline: float | None) -> None:
        """Before a failed request is tried again."""
        self._step_aside()
        loop = asyncio.get_running_loop()
        pause = self._presence.retry_pause()
        if deadline is not None:
            if loop.time() >= deadline:
                raise await self._not_elected()
            pause = min(pause, deadline - loop.time())
        await asyncio.sleep(pause)

    async def _not_elected(self) -> NotElected:
        asked, because = self._asked, self._behind
        if self._trouble is not None:
            because = str(self._trouble)
        else:
            with contextlib.suppress(StoreError):
                leader = await self._presence.leader(asked.election, asked.kind)
                because = f"{leader.name!r} leads" if leader else because
        if asked.kind == "locks":
            return NotElected(f"{asked.name!r} did not get the lock {asked.election!r} in time")
        return NotElected(
            f"{asked.name!r} was not elected to {asked.election!r} in time: {because}"
        )

    def _on_mail(self) -> None:
        self._unread = True
        self._wake()

    async def _read_mail(self, heart: Heart) -> None:
        """Learn whether an order names this attempt as heir; if so, say that it is ready."""
        if not self._unread:
            return
        asked = self._asked
        key = mail_key(asked.election, self._attempt, asked.kind)
        self._unread = False
        try:
            mail = await self._presence.call(self._presence.store.get(key))
            called = "" if mail is None else mail.lease or ""
            if not called or called != self._called:
                self._called = ""
                await self._take_back()
            if called:
                await asyncio.gather(self._watch_record(), self._say_ready(called.encode(), heart))
        except BaseException:
            self._unread = True
            raise
        self._called = called

    async def _say_ready(self, word: bytes, heart: Heart) -> None:
        key = self._ready_key(self._attempt)
        while (await self._lay(key, word, heart)).value != word:
            await self._take_back()  # our word on an earlier order, which came late

    async def _claim_priority(self, heart: Heart, leader: Entry) -> float | None:
        """At the head of the line behind a leader of lower rank: order it to let go, once it has
        led for the cooldown as far as this candidate knows. Returns when that will be.

        If another's order stands there, its end wakes us.
        """
        asked = self._asked
        if not asked.preempt or Claim.decode(leader.value).rank >= asked.priority:
            return None
        now = asyncio.get_running_loop().time()
        if self._seen is None or self._seen[0] != leader.revision:
            self._seen = leader.revision, now
        due = self._seen[1] + asked.cooldown_s
        if now < due:
            return due
        order = Order(leader.revision, asked.name, self._attempt, asked.priority)
        key = order_key(asked.election, asked.kind)
        standing = await self._lay(key, order.encode(), heart)
        if _is_void(standing, leader.revision):
            await self._presence.call(self._presence.store.delete(key, if_version=standing.version))
            self._wake()
        return None

    async def _lay(self, key: str, value: bytes, heart: Heart) -> Entry:
        """Lay an order, or word to be ready, and return what stands there then."""
        self._laid[key] = None
        return (await self._ask(self._presence.store.create(key, value, heart.lease))).entry

    async def _take_back(self) -> None:
        """Remove this attempt's order and its word to be ready. While a request of ours may still
        arrive they are looked for again the next time."""
        presence, store = self._presence, self._presence.store
        for key in list(self._laid):
            entry = await presence.call(store.get(key))
            if (
                self._heart is not None
                and entry is not None
                and entry.lease == self._heart.lease.id
            ):
                order = Order.decode(entry.value)
                if order is None or order.heir == self._attempt:
                    await presence.call(store.delete(key, if_version=entry.version))
            if not self._doubtful:
                self._laid.pop(key, None)

    def _begin_term(self, heart: Heart, record: Entry) -> Term:
        presence, asked = self._presence, self._asked
        self._record = record
        if self._left:
            raise NotElected(f"{asked.name!r} has left the election {asked.election!r}")
        if heart.lose_if_expired() or heart.lost_because is not None:
            raise LeaseGone("the lease ran out while the record was being created")
        term = Term(
            election=asked.election,
            kind=asked.kind,
            name=asked.name,
            meta=asked.meta,
            token=record.revision,
            heart=heart,
            clock=presence.clock,
        )
        self._term = term
        heart.work_goes_on()
        presence.body_begins(heart)
        presence.telemetry.emit(
            Elected(
                election=asked.election,
                name=asked.name,
                token=term.token,
                lease=heart.lease.id,
                valid_until=heart.valid_until,
            )
        )
        term.on_end(self._term_ended)
        if heart.lost_because is not None:
            term.lose(heart.lost_because)
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        # What happened to the record since it was created came before there was a term to tell.
        # The body goes first, and does not share the processor with this.
        asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._changed)
        return term

    def _heart_lost(self, heart: Heart, reason: str) -> None:
        """Any thread, the watchdog's above all: the body is told before anything else.

        Word of a heart that this candidacy no longer stands on may come late; it is dropped.
        """
        if self._term is not None and heart is self._heart:
            self._term.lose(reason)
        self._presence.runtime.post(self._wake)

    def _changed(self) -> None:
        """The record, or an order beside it, has changed: watched as candidate and as leader."""
        self._wake()
        if self._term is not None and not self._left and not self._looking:
            self._looking = True
            self._presence.spawn(self._look(self._term))

    async def _look(self, term: Term) -> None:
        """As leader: see whether the record still stands, and whether there is an order.

        The record is watched from here on, and not before the term began, so that the body need
        not wait for that.
        """
        presence = self._presence
        try:
            while term.valid:
                self._woken = False
                try:
                    await self._watch_record()
                    record, order = await asyncio.gather(
                        self._get(self._record_key), self._order_for(term)
                    )
                    if self._laid:
                        await self._take_back()
                except Exception as error:
                    if not isinstance(error, StoreError):
                        log.exception("looking at the record of %r failed; it is tried again", term)
                    await asyncio.sleep(presence.retry_pause())
                    continue
                if record is None or record.revision != term.token:
                    term.lose("its record was removed from the store by somebody else")
                elif order is not None:
                    if order.heir and order.rank is None:
                        self._heir = self._ready_key(order.heir)
                    term.lose(f"{order.by!r} ordered it to let go")
                elif not self._woken:
                    break
        finally:
            self._looking = False

    async def _order_for(self, term: Term) -> Order | None:
        """The order that this leader has to obey now, if any. One that is void is removed."""
        presence, store, asked = self._presence, self._presence.store, self._asked
        entry = await self._order()
        if entry is None:
            return None
        if _is_void(entry, term.token):
            await presence.call(store.delete(entry.key, if_version=entry.version))
            return None
        order = Order.decode(entry.value)
        if order is None or order.token != term.token:
            return None
        if order.rank is not None:  # of the heir itself, on its own lease: it is ready
            return order if order.rank > asked.priority else None
        if order.heir:
            ready = await self._get(self._ready_key(order.heir))
            if not _is_ready(ready, entry):
                return None
        return order

    def _term_ended(self) -> None:
        """Any thread. Of a term that its body has ended, `leave` takes care."""
        if self._term is not None and self._term.state is TermState.LOST:
            self._presence.runtime.post(self._term_lost)

    def _term_lost(self) -> None:
        term, heart, asked = self._term, self._heart, self._asked
        assert term is not None
        assert heart is not None
        presence = self._presence
        ended_at = term.ended_at
        presence.telemetry.emit(
            Lost(
                election=asked.election,
                name=asked.name,
                token=term.token,
                lease=heart.lease.id,
                reason=term.reason,
                ended_at=ended_at,
            )
        )
        if not self._left:
            budget = ended_at + heart.timing.stop_budget_s - presence.clock.now()
            asyncio.get_running_loop().call_later(max(0.0, budget), self._overrun, term, heart)

    def _overrun(self, term: Term, heart: Heart) -> None:
        if self._left:
            return
        asked = self._asked
        self._presence.telemetry.emit(
            Overrun(
                election=asked.election, name=asked.name, token=term.token, lease=heart.lease.id
            )
        )
        if asked.on_overrun == "exit":
            self._presence.telemetry.flush(LAST_WORDS_S)
            self._presence.runtime.flush_log(LAST_WORDS_S)
            os._exit(OVERRUN_EXIT_CODE)

    async def leave(self) -> None:
        """Let go. The body, if there was one, has ended.

        Returns when the record and the ticket are gone, or, where the store does not answer,
        after a while; the rest is then done in the background, as long as the lease lives.
        """
        if self._left:
            return
        self._left = True
        term, heart, asked = self._term, self._heart, self._asked
        if term is not None and heart is not None:
            if term.conclude():
                self._presence.telemetry.emit(
                    Resigned(
                        election=asked.election,
                        name=asked.name,
                        token=term.token,
                        lease=heart.lease.id,
                    )
                )
            self._presence.body_ended(heart)
        letting_go = self._let_go_in_background()
        if letting_go is not None:
            await asyncio.wait({letting_go}, timeout=3 * self._presence.timing.request_timeout_s)

    def _drop_watches(self) -> None:
        for watch in (self._watch, self._mailbox):
            if watch is not None:
                watch.close()
        self._watch = self._mailbox = None

    def _let_go_in_background(self) -> asyncio.Task[None] | None:
        self._left = True
        heart = self._heart
        if heart is None:
            return None
        heart.forget(self)
        left = self._ticket or self._record or self._laid or self._doubtful
        if not left or heart.lost_because is not None:
            self._end_attempt(heart)
            return None
        return self._presence.spawn(self._let_go(heart))

    async def _let_go(self, heart: Heart) -> None:
        """Remove what is ours while the lease lives; after its end the store does it.

        A request whose answer was lost may still arrive, so for one ttl after an unknown outcome
        its traces are looked for again.
        """
        presence = self._presence
        doubt_ends = presence.clock.now() + heart.timing.ttl_s
        try:
            while heart.lost_because is None:
                try:
                    await self._let_heir_in()
                    async with presence.entrance:
                        await self._remove_traces()
                except (StoreUnavailable, OutcomeUnknown):
                    await asyncio.sleep(presence.retry_pause())
                    continue
                except StoreError as error:
                    heart.lose(f"what the session held could not be let go: {error}")
                    return
                if not self._doubtful or presence.clock.now() >= doubt_ends:
                    return
                await asyncio.sleep(heart.timing.request_timeout_s)
        finally:
            self._end_attempt(heart)

    def _end_attempt(self, heart: Heart) -> None:
        heart.attempts.discard(self._attempt)
        self._drop_watches()
        self._presence.retire(heart)

    async def _let_heir_in(self) -> None:
        """After an order in favour of an heir: delete the record, and stay in line until the heir
        has it, or has had its chance, or is gone. The line stays asleep meanwhile."""
        if self._heir:
            await self._delete(self._record)
            self._record = None
        until = asyncio.get_running_loop().time() + self._presence.timing.request_timeout_s
        while self._heir:
            self._woken = False
            record, ready = await asyncio.gather(self._get(self._record_key), self._get(self._heir))
            if record is not None or ready is None or not await self._sleep(until):
                self._heir = ""

    async def _remove_traces(self) -> None:
        presence, store = self._presence, self._presence.store
        if self._record is None and self._doubtful:
            record = await presence.call(store.get(self._record_key))
            if record is not None and self._is_mine(record):
                self._record = record
        # One after the other, but without waiting in between: a successor that comes to the record
        # before it is gone waits for that.
        await asyncio.gather(*map(self._delete, (self._record, self._ticket)))
        self._record = self._ticket = None
        if self._doubtful and self._asked.recipe == "line":
            for ticket in await presence.call(store.list(self._line_key())):
                if self._is_mine(ticket):
                    await presence.delete(ticket)
        await self._take_back()

    async def _delete(self, entry: Entry | None) -> None:
        if entry is not None:
            await self._presence.delete(entry)


def _is_void(order: Entry, token: int) -> bool:
    """Whether what stands where orders are laid was meant for a term before this one."""
    meant = Order.decode(order.value)
    return meant is None or meant.token < token


def _is_ready(word: Entry | None, order: Entry) -> bool:
    """Whether an heir has said that it is ready for this very order."""
    return word is not None and word.value == (order.lease or "").encode()


def _when(instant: float | None) -> float:
    return math.inf if instant is None else instant
