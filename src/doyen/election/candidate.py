"""One candidate in one election, and the passages between its states.

    claiming ──── record created ────▶ leading ──── body ended ────▶ leaving
    (`Claiming`)                       (`Leading`)                   (`Attempt.leave`)
        │    ▲                                                          ▲
        │    └── lease lost: a new attempt                              │
        └────────────── deadline, error or cancellation ────────────────┘

In keys: a ticket in the election's line; at the head of the line, the creation of the leader
record, whose creation revision is the token. The leader keeps its ticket. It leaves by deleting
the record, then the ticket.

The creation is the one write that safety rests on. The record is created atomically, only if
absent, under a lease that this process keeps alive and whose validity it counts from the instant of
sending. The line keeps candidates in order, and wakes one of them per change instead of all; a
mistake in it cannot make two leaders. In the recipe `race` there is no line, and every candidate
may always claim.

A candidate that is woken is almost always the next. So it creates the record and checks whether it
is its turn at the same time, which saves one round trip per handover. If it was not its turn,
because a candidate of higher priority has joined meanwhile, it deletes the record again without
beginning a term. A leader that hands over to a named successor keeps its ticket until the successor
has the record, so that no other candidate is woken.

`attempt` states the invariants for unknown outcomes, and when a record may be deleted; `leader`
states what a leader watches and obeys. A campaign that is not elected raises an exception: no body
is ever entered without the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from contextvars import ContextVar
from functools import partial

from doyen.election.attempt import Attempt, Wakeup
from doyen.election.core import SessionCore
from doyen.election.handover import Succession, is_ready, is_void, ready_marker_key
from doyen.election.leader import Leading
from doyen.election.options import CampaignSettings
from doyen.election.queries import is_foreign, read_leader
from doyen.errors import (
    AlreadyCampaigning,
    LeaseGone,
    NotElected,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    TicketGone,
)
from doyen.events import ForeignLeader, Hindered, Waiting
from doyen.events.telemetry import SOON_S
from doyen.lease.keepalive import Keepalive
from doyen.model import HAS, Claim, Entry, Order, line_key, order_key_below
from doyen.stores.port import Creation, Watch
from doyen.term import Term, TermState

__all__ = ["Candidacy", "entered_campaigns"]

entered_campaigns: ContextVar[tuple[Candidacy, ...]] = ContextVar("doyen_entered", default=())
"""The campaigns whose bodies enclose the calling code. Another campaign for one of their elections
would wait for itself."""


class _Withdrawn(Exception):
    """The candidate's member has become ineligible."""


class Claiming:
    """The state of an attempt that tries to become the leader, from its ticket to its record."""

    def __init__(self, attempt: Attempt, candidacy: Candidacy) -> None:
        self.attempt = attempt
        self.succession = Succession(attempt)
        self._candidacy = candidacy
        self._created = False
        """A creation of the record was sent and is not known to have failed. It may have been
        carried out, or may be while this candidate waits in line: then every candidate would wait
        for that record."""
        self._woken = False
        """The ticket ahead, or the record, has changed: this candidate is probably the next."""
        self._creation: Creation | None = None
        """The response to a creation of the record, until this attempt has acted on it."""
        self._giving_back = False
        """The deletion of the record was sent, or is to be. This attempt must not lead with it: an
        unanswered deletion may be carried out at any time."""
        self._given_back = 0
        """The revision of the last record that was given back. A failover that loses the deletion
        brings it back, and others may have led since with higher tokens."""
        self._ahead_watch: Watch | None = None
        """The watch of the ticket that was ahead. It is closed once the next requests are sent."""

    def close(self) -> None:
        """Stop watching."""
        self.succession.close()
        self._close_ahead_watch()

    def _close_ahead_watch(self) -> None:
        if self._ahead_watch is not None:
            self._ahead_watch.close()
            self._ahead_watch = None

    async def win(self) -> Entry:
        """Wait in line and claim the record until it is this attempt's own."""
        attempt = self.attempt
        await self._join()
        while True:
            attempt.wakeup.woken = False
            if attempt.keepalive.lost_because is not None:
                raise LeaseGone(attempt.keepalive.lost_because)
            if attempt.settings.member is not None and attempt.settings.member.ineligible_because:
                raise _Withdrawn
            if self._giving_back:
                await self._give_back()
            if self._created:
                await attempt.watch_record()
                record = await attempt.get(attempt.record_key)
                if record is not None and attempt.is_mine(record):
                    if self._may_lead_with(record):
                        return record
                    continue
            if await self._is_my_turn():
                record = await self._create()
                if record is not None:
                    return record

    async def _join(self) -> None:
        """Take a ticket, unless the attempt has one or needs none."""
        attempt, settings = self.attempt, self.attempt.settings
        waits_in_line = settings.recipe == "line" and attempt.core.capabilities.has_line
        if not waits_in_line or attempt.ticket is not None:
            return
        store, line = attempt.core.store, line_key(settings.election, settings.kind)
        attempt.ticket = await self._earlier_ticket(line)
        if attempt.ticket is None:
            ticket = await attempt.write(
                store.enqueue(
                    line, attempt.ticket_value(), attempt.keepalive.lease, rank=settings.priority
                )
            )
            # An earlier enqueue may have been carried out since. A candidate that joined between
            # the two waits behind that ticket, and this one would wait behind that candidate.
            attempt.ticket = await self._earlier_ticket(line) or ticket

    async def _earlier_ticket(self, line: str) -> Entry | None:
        """The first ticket of this attempt, if the outcome of a write is unknown."""
        attempt = self.attempt
        tickets = await attempt.core.call(attempt.core.store.list(line)) if attempt.in_doubt else []
        return next(filter(attempt.is_mine, tickets), None)

    async def _is_my_turn(self) -> bool:
        """Whether to claim the record now. If not, returns when something has changed."""
        attempt = self.attempt
        await self.succession.read()
        attempt.in_turn = False
        if self.succession.order:
            self._creation = None
            return True
        before = self._created
        try:
            ahead, order = await self._look()
        finally:
            if self._ahead_watch is not None:  # once a new leader has begun
                asyncio.get_running_loop().call_later(SOON_S, self._ahead_watch.close)
                self._ahead_watch = None
        attempt.in_turn = ahead is None
        creation = self._creation
        has_record = creation is not None and self._is_ours(creation)
        if ahead is not None:
            self._creation = None
            if has_record:
                self._created, self._giving_back = before, True
                await self._give_back()
            await self._wait_behind(ahead)
            return False
        if has_record or order is None:
            return True
        self._creation = None  # the record may be another's by then
        return not await self._give_way(order)

    async def _look(self) -> tuple[Entry | None, Entry | None]:
        """Read the ticket ahead, and the order. A candidate that is probably the next creates the
        record at the same time."""
        attempt = self.attempt
        key = order_key_below(attempt.record_key)
        self._creation = None
        if not self._woken:
            return await asyncio.gather(self._ahead(), attempt.get(key))
        self._woken = False
        record, lease, ticket = attempt.record_key, attempt.keepalive.lease, attempt.ticket
        before, self._created = self._created, True
        store, value = attempt.core.store, attempt.record_value()
        looked = attempt.write_now(
            lambda: store.create_and_look_now(record, value, lease, ticket, key)
        )
        if looked is None:
            looked = await attempt.write(store.create_and_look(record, value, lease, ticket, key))
        self._note(looked.creation, before)
        if looked.failure is not None:
            raise looked.failure
        self._creation = looked.creation
        return looked.ahead, looked.other

    async def _request_record(self) -> Creation:
        attempt, store = self.attempt, self.attempt.core.store
        before, self._created = self._created, True
        creation = await attempt.write(
            store.create(attempt.record_key, attempt.record_value(), attempt.keepalive.lease)
        )
        self._note(creation, before)
        return creation

    def _note(self, creation: Creation, before: bool) -> None:
        """Note the answer to a creation of the record."""
        if self._is_ours(creation):
            self.attempt.record = creation.entry  # if the attempt ends now, it is deleted
        else:
            self._created = before

    def _is_ours(self, creation: Creation) -> bool:
        return creation.won or self.attempt.is_mine(creation.entry)

    async def _give_back(self) -> None:
        """It is another candidate's turn: delete the record, with which this attempt has not
        led."""
        if self.attempt.record is not None:
            self._given_back = max(self._given_back, self.attempt.record.revision)
            await self.attempt.core.deletions.delete(self.attempt.record)
        self.attempt.record = None
        self._giving_back = False

    def _may_lead_with(self, record: Entry) -> bool:
        """False if this attempt has given the record back before; it is then deleted again."""
        if record.revision > self._given_back:
            return True
        self.attempt.record, self._giving_back = record, True
        return False

    async def _ahead(self) -> Entry | None:
        ticket = self.attempt.ticket
        return None if ticket is None else await self.attempt.ahead(ticket)

    async def _wait_behind(self, ahead: Entry) -> None:
        """Wait until the ticket directly ahead changes. No other ticket wakes this candidate."""
        attempt, core = self.attempt, self.attempt.core
        if attempt.is_mine(ahead):
            # An enqueue whose response was lost was carried out late. A candidate that waited
            # behind it would wait for itself.
            await core.deletions.delete(ahead)
            return
        # With priorities, another candidate may have joined ahead of both. After an outage all
        # watches notify, whether or not anything has changed.
        is_next = attempt.settings.priority == Claim.decode(ahead.value).rank == 0

        def notified() -> None:
            self._woken = is_next and not core.calls.failing
            attempt.wakeup.wake()

        self._close_ahead_watch()
        self._ahead_watch = await core.call(core.store.watch(ahead.key, notified))
        if core.capabilities.layout and is_foreign(ahead):
            await attempt.watch_record()  # to notice the term of each foreign leader
        if await attempt.get(ahead.key) is not None:
            self._woken = False
            await self._wait_for(ahead)

    async def _give_way(self, entry: Entry) -> bool:
        """At the head of the line, while an order names another candidate as the successor: wait
        for the leader to delete its record without claiming it, and then for the successor to
        claim it, for one request timeout. False if there is nothing to wait for."""
        attempt, candidacy = self.attempt, self._candidacy
        order = Order.decode(entry.value)
        if order is None or not order.successor or order.rank is not None:
            return False
        await attempt.watch_record()
        record, ready = await asyncio.gather(
            attempt.get(attempt.record_key), attempt.get(ready_marker_key(attempt, order.successor))
        )
        if record is not None:
            if record.revision == order.token:
                await self._wait_for(record)
            return record.revision == order.token
        if not is_ready(ready, entry):
            return False
        now, lease = asyncio.get_running_loop().time(), entry.lease or ""
        if candidacy.deferral is None or candidacy.deferral[0] != lease:
            candidacy.deferral = lease, now + attempt.core.calls.timing.request_timeout_s
        until = candidacy.deferral[1]
        if now >= until:
            return False
        await candidacy.sleep(attempt, until)
        return True

    async def _wait_for(self, entry: Entry, until: float = math.inf) -> None:
        """Wait for the holder of a ticket or record. Returns when something has changed, and at
        `until` at the latest."""
        attempt, candidacy, core = self.attempt, self._candidacy, self.attempt.core
        if await core.deletions.delete_left_over(entry):
            return
        takes_orders = attempt.ticket is not None and attempt.settings.kind != "semaphores"
        if takes_orders and await self.succession.watch():
            return
        if core.capabilities.layout and is_foreign(entry):
            await self._report_foreign()
        name = Claim.decode(entry.value).name
        where = "leads" if entry.key == attempt.record_key else "is ahead in line"
        if candidacy.behind != f"{name!r} {where}":
            first, candidacy.behind = not candidacy.behind, f"{name!r} {where}"
            settings = attempt.settings
            core.telemetry.emit(Waiting(**settings.identity, behind=name, joined=first))
        candidacy.error = None
        await candidacy.sleep(attempt, until)

    async def _report_foreign(self) -> None:
        """Report the leader, if it is a candidate of another program, once for each of its terms:
        no such program writes an audit log."""
        attempt, candidacy = self.attempt, self._candidacy
        asked_at = attempt.core.runtime.clock.now()
        record = await attempt.get(attempt.record_key)
        if record is None or not is_foreign(record) or record.revision == candidacy.foreign:
            return
        candidacy.foreign = record.revision
        leader = Claim.decode(record.value).name
        event = ForeignLeader(
            **attempt.settings.identity, leader=leader, token=record.revision, since=asked_at
        )
        attempt.core.telemetry.emit(event)

    async def _create(self) -> Entry | None:
        """Create the record. If another attempt's is there, wait for it to change."""
        attempt = self.attempt
        creation, self._creation = self._creation, None
        if creation is None:
            creation = await self._request_record()
        if self._is_ours(creation):
            return creation.entry if self._may_lead_with(creation.entry) else None
        if await attempt.watch_record():
            return None  # to look again: it may have changed before it was watched
        await self._wait_for(creation.entry, await self._preempt(creation.entry))
        self._woken = True
        return None

    async def _preempt(self, leader: Entry) -> float:
        """Order a leader of lower priority to resign, once this candidate has known it for the
        cooldown. Returns when that will be; infinity if there is nothing to do then.

        If another order is there already, its end wakes this candidate.
        """
        attempt, settings = self.attempt, self.attempt.settings
        if not settings.preempt or Claim.decode(leader.value).rank >= settings.priority:
            return math.inf
        now = asyncio.get_running_loop().time()
        known = self._candidacy.known_leader
        if known is None or known[0] != leader.revision:
            known = self._candidacy.known_leader = leader.revision, now
        due = known[1] + settings.cooldown_s
        if now < due:
            return due
        order = Order(leader.revision, settings.name, attempt.id, settings.priority)
        key = order_key_below(attempt.record_key)
        written = await attempt.write_marker(key, order.encode())
        if is_void(written, leader.revision):
            core = attempt.core
            await core.call(core.store.delete(key, if_version=written.version))
            attempt.wakeup.wake()
        return math.inf


class Candidacy:
    """One campaign on doyen's loop: its deadline, what it waits for, and its current state."""

    __slots__ = (
        *("_admitted", "_claiming", "_claiming_type", "_deadline", "_leading", "_leaving"),
        *("_left", "_winning", "behind", "core", "deferral", "error", "foreign", "known_leader"),
        "settings",
    )

    def __init__(
        self,
        core: SessionCore,
        settings: CampaignSettings,
        claiming: type[Claiming] = Claiming,
    ) -> None:
        """On the caller's thread. Raises if the session is closed, or if the calling scope would
        wait for itself."""
        self.core = core
        self.settings = settings
        core.check_open()
        held = [
            each.term
            for each in entered_campaigns.get()
            if each.core is core
            and each.settings.election == settings.election
            and each.settings.kind == settings.kind
            and each.term.state in (TermState.LEADER, TermState.UNSURE)
        ]
        if len(held) >= settings.slots:
            raise AlreadyCampaigning(
                f"{held[0].name!r} already {HAS[settings.kind]} {settings.election!r} in this scope"
                " and session: a second campaign would wait for the first without end"
            )
        self._claiming_type = claiming
        self._claiming: Claiming | None = None
        self._leading: Leading | None = None
        self._left = False
        self._leaving: asyncio.Task[None] | None = None
        """Removes what the campaign has in the store, once it has left."""
        self._winning: asyncio.Task[object] | None = None
        """The task that runs `win`, until that has ended."""
        self._deadline = math.inf
        """When to give up, on the loop's clock."""
        self._admitted = False
        """Holds a place of the session's admission: it is joining a line or claiming a record."""
        self.behind = ""
        """What the candidate waits for, to report it."""
        self.error: StoreError | None = None
        """The last error of the store, until it works again."""
        self.known_leader: tuple[int, float] | None = None
        """The leader that this candidate would preempt, by token, and since when it knows it."""
        self.foreign: int | None = None
        """The token of the foreign leader that was reported last."""
        self.deferral: tuple[str, float] | None = None
        """The lease of the order to whose successor this candidate gives way, and until when."""

    @property
    def term(self) -> Term:
        """The term, once elected."""
        assert self._leading is not None
        return self._leading.term

    async def win(self) -> Term:
        """Campaign until elected. Raises `NotElected` after `wait_s`, and leaves the line then."""
        core, settings = self.core, self.settings
        if self._left:
            raise self._has_left()
        self._winning = asyncio.current_task()
        limit = None
        if settings.wait_s is not None:
            self._deadline = asyncio.get_running_loop().time() + settings.wait_s
            limit = self._deadline + core.calls.timing.request_timeout_s  # for a single try
        try:
            if not core.admission.enter_now():
                async with asyncio.timeout_at(limit):
                    await core.admission.enter()
            self._admitted = True
            while True:
                await self._wait_until_eligible()
                claiming = self._claiming
                try:
                    if claiming is None or claiming.attempt.keepalive.lose_if_expired():
                        keepalive = await self._keepalive(limit)
                        if claiming is not None:  # its lease is lost: the store removes its entries
                            claiming.close()
                            claiming.attempt.end()
                        claiming = self._claiming_type(Attempt(core, settings, keepalive), self)
                        self._claiming = claiming
                    claiming.attempt.record = record = await claiming.win()
                    if self._left:
                        raise self._has_left()
                    self._leading = Leading(claiming.attempt, record)
                    claiming.close()
                    self._claiming = None
                    return self._leading.term
                except LeaseGone as error:
                    self.error = error
                    if claiming is not None:
                        claiming.attempt.keepalive.lose(str(error))
                except _Withdrawn:
                    self._withdraw()
                except TicketGone as error:
                    # The attempt goes on, because its creation of the record may be under way.
                    self.error = error
                    if claiming is not None:
                        claiming.attempt.ticket = None
                except (StoreUnavailable, OutcomeUnknown) as error:
                    await self._pause(error)
        except TimeoutError:
            self._start_leaving()
            if self.error is None:
                self.error = StoreUnavailable("the store is slow to answer other candidates")
            raise await self._not_elected() from None
        except BaseException:
            self._start_leaving()
            raise
        finally:
            self._winning = None
            if settings.member is not None:
                settings.member.forget(self)
            self._leave_admission()

    async def _keepalive(self, limit: float | None) -> Keepalive:
        """The keepalive of the lease of a new attempt."""
        leases, settings = self.core.leases, self.settings
        shares = settings.stall_after_s is None and not self.core.capabilities.layout
        if shares and (held := leases.held()) is not None:
            return held
        async with asyncio.timeout_at(limit):
            return await (leases.shared() if shares else leases.own(settings.stall_after_s))

    async def _wait_until_eligible(self) -> None:
        """Outside the line, wait until the candidate may lead. Raises `NotElected` at the
        deadline."""
        member = self.settings.member
        if member is None:
            return
        changed = Wakeup()
        member.on_eligibility(self, partial(self._eligibility_changed, changed))
        while member.ineligible_because:
            self._withdraw()
            self._leave_admission()
            changed.woken = False
            if not await changed.sleep(self._deadline):
                raise NotElected(
                    f"{self.settings.name!r} was not elected to {self.settings.election!r} in"
                    f" time: {member.ineligible_because}"
                )

    def _eligibility_changed(self, wakeup: Wakeup) -> None:
        wakeup.wake()
        if self._claiming is not None:
            self._claiming.attempt.wakeup.wake()

    def _withdraw(self) -> None:
        """Leave the line, in the background."""
        if self._claiming is not None:
            claiming, self._claiming = self._claiming, None
            claiming.close()
            claiming.attempt.leave()

    def _leave_admission(self) -> None:
        """Let another candidate of the session in: this one is elected, or waits."""
        if self._admitted:
            self._admitted = False
            self.core.admission.leave()

    async def sleep(self, attempt: Attempt, until: float = math.inf) -> None:
        """Sleep until woken, or until the time has come. Raises `NotElected` at the deadline."""
        if not attempt.wakeup.woken:
            self._leave_admission()
        woken = await attempt.wakeup.sleep(min(self._deadline, until))
        if not woken and self._deadline <= until:
            raise await self._not_elected()

    async def _pause(self, error: StoreError) -> None:
        """Wait before a request that failed is retried. Each error is reported once."""
        if str(error) != str(self.error):
            settings = self.settings
            self.core.telemetry.emit(Hindered(**settings.identity, error=str(error)))
        self.error = error
        self._leave_admission()
        left_s = self._deadline - asyncio.get_running_loop().time()
        pause_s = self.core.calls.retry_pause()
        if left_s <= 0:
            raise await self._not_elected()
        await asyncio.sleep(min(pause_s, left_s))

    def _has_left(self) -> NotElected:
        return NotElected(
            f"{self.settings.name!r} has left the election {self.settings.election!r}"
        )

    async def _not_elected(self) -> NotElected:
        """The error for a campaign that has reached its deadline."""
        settings, because = self.settings, self.behind
        if self.error is not None:
            because = str(self.error)
        elif settings.kind == "elections":
            with contextlib.suppress(StoreError):
                leader = await read_leader(self.core, settings.election, settings.kind)
                because = f"{leader.name!r} leads" if leader else because
        name, election = settings.name, settings.election
        if settings.kind == "semaphores":
            return NotElected(
                f"{name!r} did not get a slot of the semaphore {election!r} in time: {because}"
            )
        if settings.kind == "locks":
            return NotElected(f"{name!r} did not get the lock {election!r} in time")
        return NotElected(f"{name!r} was not elected to {election!r} in time: {because}")

    async def leave(self) -> None:
        """Leave the election. The body, if there was one, has ended, apart from processes that its
        supervisor is still stopping.

        Returns when the record and the ticket are deleted, or after three request timeouts. What
        remains is then deleted in the background for as long as the lease lives.
        """
        if self._left:
            return
        self._left = True
        limit_s = 3 * self.core.calls.timing.request_timeout_s
        if self._winning is not None:
            # The exception of a signal handler can end the caller's wait without cancelling `win`,
            # which would then take a ticket after the tickets have been removed. `win` leaves by
            # itself when it is cancelled.
            self._winning.cancel()
            began = asyncio.get_running_loop().time()
            await asyncio.wait({self._winning}, timeout=limit_s)
            limit_s -= asyncio.get_running_loop().time() - began
        else:
            self._start_leaving()
        if self._leaving is not None:
            await asyncio.wait({self._leaving}, timeout=max(0.0, limit_s))

    def conclude(self) -> None:
        """The body has ended. What it has in the store stays until `leave`."""
        if self._leading is not None and not self._left and not self.supervises:
            self._leading.body_ended()

    @property
    def supervises(self) -> bool:
        """Whether processes of a supervised command may be alive."""
        return self._leading is not None and self._leading.supervises

    def _start_leaving(self) -> None:
        self._left = True
        self._leaving = self._begin_removal()

    def _begin_removal(self) -> asyncio.Task[None] | None:
        self.core.telemetry.left(**self.settings.identity)
        if self._leading is not None and self.supervises:
            return self.core.tasks.start(self._leave_after_runs(self._leading))
        if self._leading is not None:
            self._leading.body_ended()
            return self._leading.attempt.leave(self._leading.successor)
        if self._claiming is not None:
            self._claiming.close()
            return self._claiming.attempt.leave()
        return None

    async def _leave_after_runs(self, leading: Leading) -> None:
        await leading.without_processes()
        leading.body_ended()
        leaving = leading.attempt.leave(leading.successor)
        if leaving is not None:
            await leaving
