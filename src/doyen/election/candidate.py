"""One candidate in one election, and the passages between its states.

    claiming ──── record created ────▶ leading ──── body ended ────▶ leaving
    (in line, then `Claiming`)         (`Leading`)                   (`start_leaving`)
        │    ▲                                                          ▲
        │    └── lease lost: a new attempt                              │
        └────────────── deadline, error or cancellation ────────────────┘

In keys: a ticket in the election's line; at the head of the line, the creation of the leader
record, whose creation revision is the token. The leader keeps its ticket. It leaves by deleting
the record, then the ticket.

What makes two leaders impossible is in `claim`; what is kept when outcomes are unknown, in
`attempt`; what a leader watches and obeys, in `leader`; when its record may be deleted, in
`leaving`. To fail to be elected raises: no body is ever entered without the record.

Imports the states.
"""

from __future__ import annotations

import asyncio
import math

from doyen.election.attempt import Attempt
from doyen.election.claim import Claiming
from doyen.election.core import SessionCore
from doyen.election.leader import Leading
from doyen.election.leaving import start_leaving
from doyen.election.line import CampaignWait
from doyen.election.options import CampaignSettings
from doyen.errors import LeaseGone, NotElected, OutcomeUnknown, StoreUnavailable, TicketGone
from doyen.term import Term

__all__ = ["Candidacy"]


class Candidacy:
    """One campaign on doyen's loop."""

    __slots__ = ("_claiming", "_core", "_leading", "_left", "_settings")

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        self._core = core
        self._settings = settings
        self._claiming: Claiming | None = None
        self._leading: Leading | None = None
        self._left = False

    async def win(self) -> Term:
        """Campaign until elected. Raises `NotElected` after `wait_s`, and leaves the line then."""
        core, wait_s = self._core, self._settings.wait_s
        now = asyncio.get_running_loop().time()
        wait = CampaignWait(core, self._settings, math.inf if wait_s is None else now + wait_s)
        try:
            if core.admission.locked():
                await wait.in_time(core.admission.acquire())
            else:
                await core.admission.acquire()  # returns at once
            wait.admitted = True
            while True:
                try:
                    return await self._try(wait)
                except LeaseGone as error:
                    wait.error = error
                    if self._claiming is not None:
                        self._claiming.attempt.keepalive.lose(str(error))
                except TicketGone as error:
                    # The attempt goes on, because its creation of the record may be under way.
                    wait.error = error
                    if self._claiming is not None:
                        self._claiming.attempt.ticket = None
                except (StoreUnavailable, OutcomeUnknown) as error:
                    await wait.pause(error)
        except BaseException:
            self._start_leaving()
            raise
        finally:
            wait.leave_admission()

    async def _try(self, wait: CampaignWait) -> Term:
        """Claim and begin to lead, with the current attempt, or a new one if its lease is lost."""
        claiming, leases = self._claiming, self._core.leases
        if claiming is None or claiming.attempt.keepalive.lose_if_expired():
            stall_after_s = self._settings.stall_after_s
            keepalive = await wait.in_time(
                leases.shared() if stall_after_s is None else leases.own(stall_after_s)
            )
            if claiming is not None:
                claiming.end()
            attempt = Attempt(self._core, self._settings, keepalive)
            claiming = self._claiming = Claiming(attempt, wait)
        claiming.attempt.record = record = await claiming.win()
        if self._left:
            raise NotElected(
                f"{self._settings.name!r} has left the election {self._settings.election!r}"
            )
        self._leading = Leading(claiming.attempt, record)
        claiming.line.succession.close()
        self._claiming = None
        return self._leading.term

    async def leave(self) -> None:
        """Leave the election. The body, if there was one, has ended.

        Returns when the record and the ticket are deleted, or after three request timeouts. What
        remains is then deleted in the background for as long as the lease lives.
        """
        if self._left:
            return
        if self._leading is not None:
            self._leading.body_ended()
        leaving = self._start_leaving()
        if leaving is not None:
            await asyncio.wait({leaving}, timeout=3 * self._core.timing.request_timeout_s)

    def _start_leaving(self) -> asyncio.Task[None] | None:
        self._left = True
        if self._leading is not None:
            return start_leaving(self._leading.attempt, self._leading.successor)
        if self._claiming is not None:
            self._claiming.line.succession.close()
            return start_leaving(self._claiming.attempt)
        return None
