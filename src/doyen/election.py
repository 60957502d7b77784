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
- The record is deleted only after the body has ended, and only by its own version.
- The holder watches its record and takes its absence for loss.
- Failing to win raises; nothing is ever entered unheld.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from functools import partial
from typing import Literal, TypeVar

from doyen.errors import (
    ConfigError,
    LeaseGone,
    NotElected,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    TicketGone,
)
from doyen.events import Elected, Lost, Overrun, Resigned, Waiting
from doyen.heart import Heart
from doyen.model import Claim, Entry, Meta, leader_key, line_key
from doyen.presence import Presence
from doyen.store import Watch
from doyen.term import Term, TermState

__all__ = ["Candidacy", "OnOverrun", "Recipe"]

T = TypeVar("T")

Recipe = Literal["line", "race"]
OnOverrun = Literal["report", "exit"]

OVERRUN_EXIT_CODE = 70


class Candidacy:
    """Stands for election on a presence. Lives on doyen's loop."""

    __slots__ = (
        "_attempt",
        "_behind",
        "_confirming",
        "_doubtful",
        "_election",
        "_heart",
        "_left",
        "_meta",
        "_name",
        "_on_overrun",
        "_presence",
        "_rank",
        "_recipe",
        "_record",
        "_record_key",
        "_term",
        "_ticket",
        "_trouble",
        "_waiter",
        "_watch",
        "_woken",
    )

    def __init__(
        self,
        presence: Presence,
        election: str,
        *,
        name: str,
        meta: Meta,
        rank: int,
        recipe: Recipe,
        on_overrun: OnOverrun,
    ) -> None:
        if recipe not in ("line", "race"):
            raise ConfigError(f"recipe is 'line' or 'race', not {recipe!r}")
        if on_overrun not in ("report", "exit"):
            raise ConfigError(f"on_overrun is 'report' or 'exit', not {on_overrun!r}")
        self._presence = presence
        self._election = election
        self._name = name
        self._meta = meta
        self._rank = rank
        self._recipe = recipe
        self._on_overrun = on_overrun
        self._record_key = leader_key(election)
        Claim(name, "", meta).encode()
        self._heart: Heart | None = None
        self._term: Term | None = None
        self._left = False
        self._confirming = False
        self._behind = ""
        self._trouble: StoreError | None = None
        self._watch: Watch | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._attempt = self._presence.next_attempt()
        self._ticket: Entry | None = None
        self._record: Entry | None = None
        self._doubtful = False
        self._woken = False

    async def win(self, wait_s: float | None) -> Term:
        """Stand until elected. Raises `NotElected` after `wait_s`; leaves nothing behind then."""
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        try:
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
                    self._trouble = error
                    await self._pause(deadline)
        except BaseException:
            self._let_go_in_background()
            raise

    async def _stand(self, deadline: float | None) -> Term:
        presence, store = self._presence, self._presence.store
        heart = await presence.heart()
        if heart is not self._heart:
            self._adopt(heart)
        if self._recipe == "line" and self._ticket is None:
            self._ticket = await self._take_ticket(heart)
        while True:
            self._woken = False
            if heart.lost_because is not None:
                raise LeaseGone(heart.lost_because)
            if self._doubtful and self._watch is not None:
                # A create whose answer was lost may have landed, or land while we wait in line:
                # then everyone waits for us. The watch on the record is open and will tell.
                record = await presence.call(store.get(self._record_key))
                if record is not None and self._is_mine(record):
                    return self._begin_term(heart, record)
            ahead = None if self._ticket is None else await presence.call(store.ahead(self._ticket))
            if ahead is not None:
                await self._wait_behind(ahead, deadline)
                continue
            if self._watch is None:
                self._watch = await presence.call(store.watch(self._record_key, self._changed))
            creation = await self._ask(store.create(self._record_key, self._claim(), heart.lease))
            if creation.won or self._is_mine(creation.entry):
                return self._begin_term(heart, creation.entry)
            await self._wait(creation.entry, deadline)

    def _adopt(self, heart: Heart) -> None:
        if self._heart is not None:
            self._heart.forget(self)
            self._drop_watch()
            self._begin_attempt()
        self._heart = heart
        heart.on_loss(self, partial(self._heart_lost, heart))

    def _claim(self) -> bytes:
        return Claim(self._name, self._attempt, self._meta).encode()

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

    async def _take_ticket(self, heart: Heart) -> Entry:
        presence, line = self._presence, line_key(self._election)
        if self._doubtful:
            for ticket in await presence.call(presence.store.list(line)):
                if self._is_mine(ticket):
                    return ticket
        return await self._ask(
            presence.store.enqueue(line, self._claim(), heart.lease, rank=self._rank)
        )

    async def _wait_behind(self, ahead: Entry, deadline: float | None) -> None:
        """Wait for the ticket directly ahead to change. Nobody else's wakes us."""
        presence, store = self._presence, self._presence.store
        if self._is_mine(ahead):
            # An enqueue whose answer was lost has landed after all: waiting on it would be
            # waiting on ourselves.
            await presence.call(store.delete(ahead.key, if_version=ahead.version))
            return
        watch = await presence.call(store.watch(ahead.key, self._wake))
        try:
            if await presence.call(store.get(ahead.key)) is not None:
                await self._wait(ahead, deadline)
        finally:
            watch.close()

    async def _wait(self, behind: Entry, deadline: float | None) -> None:
        name = Claim.decode(behind.value).name
        where = "leads" if behind.key == self._record_key else "is ahead in line"
        if self._behind != f"{name!r} {where}":
            self._behind = f"{name!r} {where}"
            self._presence.telemetry.emit(
                Waiting(election=self._election, name=self._name, behind=name)
            )
        self._trouble = None
        await self._sleep_until_woken(deadline)
        if self._heart is not None and self._heart.lost_because is not None:
            raise LeaseGone(self._heart.lost_because)

    async def _sleep_until_woken(self, deadline: float | None) -> None:
        if self._woken:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await self._waiter
        except TimeoutError:
            raise await self._not_elected() from None
        finally:
            self._waiter = None

    def _wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _pause(self, deadline: float | None) -> None:
        """Before a failed request is tried again."""
        loop = asyncio.get_running_loop()
        pause = self._presence.retry_pause()
        if deadline is not None:
            if loop.time() >= deadline:
                raise await self._not_elected()
            pause = min(pause, deadline - loop.time())
        await asyncio.sleep(pause)

    async def _not_elected(self) -> NotElected:
        because = self._behind
        if self._trouble is not None:
            because = str(self._trouble)
        else:
            with contextlib.suppress(StoreError):
                leader = await self._presence.leader(self._election)
                because = f"{leader.name!r} leads" if leader else because
        return NotElected(
            f"{self._name!r} was not elected to {self._election!r} in time: {because}"
        )

    def _begin_term(self, heart: Heart, record: Entry) -> Term:
        presence = self._presence
        self._record = record
        if self._left:
            raise NotElected(f"{self._name!r} has left the election {self._election!r}")
        if heart.lose_if_expired() or heart.lost_because is not None:
            raise LeaseGone("the lease ran out while the record was being created")
        term = Term(
            election=self._election,
            name=self._name,
            meta=self._meta,
            token=record.revision,
            heart=heart,
            clock=presence.clock,
            proof=lambda: presence.store.proof(heart.lease),
        )
        self._term = term
        presence.body_begins(heart)
        presence.telemetry.emit(
            Elected(
                election=self._election,
                name=self._name,
                token=term.token,
                lease=heart.lease.id,
                valid_until=heart.valid_until,
            )
        )
        term.on_end(lambda: presence.runtime.post(self._term_over))
        if heart.lost_because is not None:
            term.lose(heart.lost_because)
        return term

    def _heart_lost(self, heart: Heart, reason: str, ended_at: float) -> None:
        """Any thread, the watchdog's above all: the body is told before anything else.

        Word of a heart that this candidacy no longer stands on may come late; it is dropped.
        """
        if self._term is not None and heart is self._heart:
            self._term.lose(reason, ended_at)
        self._presence.runtime.post(self._wake)

    def _changed(self) -> None:
        """The record, watched as candidate and as leader, has changed."""
        self._wake()
        if self._term is not None and not self._left and not self._confirming:
            self._confirming = True
            self._presence.spawn(self._confirm_record(self._term))

    async def _confirm_record(self, term: Term) -> None:
        presence = self._presence
        while term.valid:
            self._woken = False
            try:
                record = await presence.call(presence.store.get(self._record_key))
            except StoreError:
                await asyncio.sleep(presence.retry_pause())
                continue
            if record is None or record.revision != term.token:
                term.lose("its record was removed from the store by somebody else")
            elif not self._woken:
                break
        self._confirming = False

    def _term_over(self) -> None:
        term, heart = self._term, self._heart
        if term is None or heart is None or term.state is not TermState.LOST:
            return
        presence = self._presence
        ended_at = term.ended_at
        presence.telemetry.emit(
            Lost(
                election=self._election,
                name=self._name,
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
        self._presence.telemetry.emit(
            Overrun(
                election=self._election, name=self._name, token=term.token, lease=heart.lease.id
            )
        )
        if self._on_overrun == "exit":
            os._exit(OVERRUN_EXIT_CODE)

    async def leave(self) -> None:
        """Let go. The body, if there was one, has ended.

        Returns when the record and the ticket are gone, or, where the store does not answer,
        after a while; the rest is then done in the background, as long as the lease lives.
        """
        if self._left:
            return
        self._left = True
        term, heart = self._term, self._heart
        if term is not None and heart is not None:
            if term.conclude():
                self._presence.telemetry.emit(
                    Resigned(
                        election=self._election,
                        name=self._name,
                        token=term.token,
                        lease=heart.lease.id,
                    )
                )
            self._presence.body_ended(heart)
        letting_go = self._let_go_in_background()
        if letting_go is not None:
            await asyncio.wait({letting_go}, timeout=3 * self._presence.timing.request_timeout_s)

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _let_go_in_background(self) -> asyncio.Task[None] | None:
        self._left = True
        self._drop_watch()
        heart = self._heart
        if heart is None:
            return None
        heart.forget(self)
        nothing_left = self._ticket is None and self._record is None and not self._doubtful
        if nothing_left or heart.lost_because is not None:
            return None
        return self._presence.spawn(self._let_go(heart))

    async def _let_go(self, heart: Heart) -> None:
        """Remove what is ours while the lease lives; after its end the store does it.

        A request whose answer was lost may still arrive, so for one ttl after an unknown outcome
        its traces are looked for again.
        """
        presence = self._presence
        doubt_ends = presence.clock.now() + heart.timing.ttl_s
        while heart.lost_because is None:
            try:
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

    async def _remove_traces(self) -> None:
        presence, store = self._presence, self._presence.store
        if self._record is None and self._doubtful:
            record = await presence.call(store.get(self._record_key))
            if record is not None and self._is_mine(record):
                self._record = record
        if self._record is not None:
            await presence.call(store.delete(self._record.key, if_version=self._record.version))
            self._record = None
        if self._ticket is not None:
            await presence.call(store.delete(self._ticket.key, if_version=self._ticket.version))
            self._ticket = None
        if self._doubtful and self._recipe == "line":
            for ticket in await presence.call(store.list(line_key(self._election))):
                if self._is_mine(ticket):
                    await presence.call(store.delete(ticket.key, if_version=ticket.version))
