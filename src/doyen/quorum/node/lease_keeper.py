"""What the node that leads does for the keyspace: its era, renewals that others pass on, ends of
leases, and the upkeep that takes commands of its own.

It begins an era of the keyspace first. It confirms no renewal before that, and each one only after
a majority has shown, since its arrival, that this node still led. What is over by its clock (see
`leases`) it has ended by a command that is void in any other era.

Upkeep is one command at a time: it raises the cluster's version once all members support a newer
one, sets the quota that this node was given, and has the keys of ended leases removed, a slice at a
time.

Lives on the driver's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, Final, Protocol

import msgspec
from msgspec import MsgspecError

from doyen.errors import DoyenError
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import Role
from doyen.quorum.keyspace.commands import (
    BeginEra,
    ConditionFailed,
    Expire,
    KeyspaceCommand,
    RaiseVersion,
    RemoveEndedKeys,
    SetQuota,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import FIRST, NEWEST
from doyen.quorum.node.driver import Answer
from doyen.quorum.node.lease_clock import LeaseClock
from doyen.quorum.node.proposals import Request, Settle
from doyen.quorum.node.replicated import KEYSPACE

__all__ = ["AGAIN", "AGAIN_S", "CONFIRMED", "GONE", "Keeper", "LeaseProposer", "decode_leases"]

GRAIN_S: Final = 1e-3
AGAIN_S: Final = 0.01
"""Pause before something is put to the quorum again."""

LOOK_S: Final = 1.0
"""How often a leader looks whether all members support a newer version."""

CONFIRMED, GONE, AGAIN = 0, 1, 2
"""What may become of a renewal: it counts; its lease has ended; not now."""

decode_leases: Callable[[bytes], list[int]] = msgspec.msgpack.Decoder(list[int]).decode


class LeaseProposer(Protocol):
    """What is needed of a node's driver here."""

    @property
    def role(self) -> Role: ...

    def submit(
        self,
        target: int,
        body: bytes,
        settle: Settle,
        *,
        request: Request | None = None,
        internal: bool = False,
    ) -> None: ...

    def when_current(self, call: Callable[[], None]) -> None: ...

    def supported(self) -> int: ...


class Keeper:
    """The leases' keeper, while this node leads: an era, a clock, renewals, ends, upkeep."""

    def __init__(
        self, driver: LeaseProposer, keyspace: Keyspace, clock: Clock, quota_bytes: int
    ) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._quota_bytes = quota_bytes
        self._now = clock.now
        self._loop = asyncio.get_running_loop()
        self._leading = False
        self._generation = 0
        self._beginning = 0
        """The era that we have proposed to begin."""
        self._era = 0
        self._clock: LeaseClock | None = None
        """Set while we lead and the keyspace is in our era."""
        self._early: list[tuple[list[int], float, Answer]] = []
        """Renewals that arrived before our era has begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._chore: KeyspaceCommand | None = None
        """The command of our upkeep that is under way."""
        self._looking: asyncio.TimerHandle | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._leave()

    def role_changed(self, generation: int) -> None:
        leading = self._driver.role is Role.LEADING and not self._stopped
        if self._leading and not (leading and generation == self._generation):
            self._leave()
        if leading and not self._leading:
            self._leading, self._generation = True, generation
            self._begin()

    def _leave(self) -> None:
        self._leading = False
        self._clock = None
        self._beginning = 0
        self._chore = None
        if self._looking is not None:
            self._looking.cancel()
        self._set_timer()
        early, self._early = self._early, []
        for leases, _, answer in early:
            answer(encode([AGAIN] * len(leases)))

    def _begin(self) -> None:
        """Begin an era of our own."""
        self._clock = None
        self._beginning = era = self._keyspace.era + 1
        self._submit(BeginEra(era), partial(self._begun, era))

    def _begun(self, era: int, _: int, result: Any, error: BaseException | None) -> None:
        if not self._leading or era != self._beginning:
            return
        if error is not None or isinstance(decode_result(result), ConditionFailed):
            # Somebody who led before us has begun one meanwhile, or nobody knows, or the disk is
            # full and would refuse us again at once.
            self._loop.call_later(AGAIN_S, self._begin_again, era)
            return
        self._beginning = 0
        self._era = era
        self._clock = LeaseClock(self._keyspace)
        self._take_in()
        self._look()
        early, self._early = self._early, []
        for leases, arrived_at, answer in early:
            self._renew(leases, arrived_at, answer)

    def _begin_again(self, era: int) -> None:
        if self._leading and era == self._beginning:
            self._begin()

    def applied(self) -> None:
        """The keyspace has moved on."""
        if self._clock is None:
            return
        if self._keyspace.era != self._era:
            self._begin()
            return
        self._clock.settle()
        self._take_in()
        self._tend()

    def _take_in(self) -> None:
        clock = self._clock
        if clock is not None:
            if clock.take_in(self._now()):
                self._loop.call_soon(self._take_in)
            self._set_timer()

    # Renewals.

    def asked(self, question: bytes, answer: Answer) -> None:
        """A node passes renewals on to us, who lead."""
        arrived_at = self._now()
        try:
            leases = decode_leases(question)
        except MsgspecError:
            answer(b"")
            return
        if self._clock is None:
            if self._leading:
                self._early.append((leases, arrived_at, answer))
            else:
                answer(encode([AGAIN] * len(leases)))
            return
        self._renew(leases, arrived_at, answer)

    def _renew(self, leases: list[int], arrived_at: float, answer: Answer) -> None:
        clock = self._clock
        if clock is None:
            answer(encode([AGAIN] * len(leases)))
            return
        in_time = [clock.renew(lease, arrived_at) for lease in leases]

        def confirm() -> None:
            if self._clock is not clock or self._keyspace.era != self._era:
                answer(encode([AGAIN] * len(leases)))
                return
            answer(
                encode(
                    [
                        CONFIRMED
                        if timely and clock.confirmed(lease)
                        else GONE
                        if self._keyspace.lease(lease) is None
                        else AGAIN
                        for lease, timely in zip(leases, in_time, strict=True)
                    ]
                )
            )

        try:
            self._driver.when_current(confirm)
        except DoyenError:
            answer(encode([AGAIN] * len(leases)))

    # Ends.

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._clock is not None and isfinite(at := self._clock.next_deadline):
            wait_s = max(at - self._now(), GRAIN_S)
            self._timer = self._loop.call_later(wait_s, self._ring)

    def _ring(self) -> None:
        # What has arrived is read, and handed in, before anything is found to be over.
        self._timer = self._loop.call_later(0, self._ring_again)

    def _ring_again(self) -> None:
        self._timer = self._loop.call_later(0, self._end_those_due)

    def _end_those_due(self) -> None:
        clock = self._clock
        if clock is None:
            return
        while leases := clock.due(self._now()):
            self._end(clock, leases)
        self._set_timer()

    def _end(self, clock: LeaseClock, leases: tuple[int, ...]) -> None:
        if self._clock is clock:
            self._submit(Expire(self._era, leases), partial(self._ended, clock, leases))

    def _ended(
        self,
        clock: LeaseClock,
        leases: tuple[int, ...],
        _: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        """The end of some leases was agreed on, or not. If it failed, it is proposed again: those
        leases are not renewed any more, ending one twice is harmless, and the time of the others
        goes on. If it was refused, the keyspace is in another era, and all get their time anew."""
        if self._clock is not clock:
            return
        if error is not None:
            self._loop.call_later(AGAIN_S, self._end, clock, leases)
        elif isinstance(decode_result(result), ConditionFailed):
            self._begin()
        else:
            clock.settle()

    # Upkeep.

    def _look(self) -> None:
        """Tend now and, while the version may rise, again and again: who is connected changes
        without anything being applied."""
        self._tend()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._clock is not None and self._keyspace.version < NEWEST:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _tend(self) -> None:
        """Put the next command to the quorum, if there is one to put."""
        if self._clock is not None and self._chore is None:
            self._chore = chore = self._due_chore()
            if chore is not None:
                self._submit(chore, partial(self._tended, chore))

    def _due_chore(self) -> KeyspaceCommand | None:
        keyspace = self._keyspace
        if keyspace.ended:
            return RemoveEndedKeys()
        if keyspace.version < NEWEST:
            supported = min(self._driver.supported(), NEWEST)
            if supported > keyspace.version:
                return RaiseVersion(supported)
        if keyspace.version > FIRST and keyspace.quota != self._quota_bytes:
            return SetQuota(self._quota_bytes)
        return None

    def _tended(
        self, chore: KeyspaceCommand, _: int, result: Any, error: BaseException | None
    ) -> None:
        if self._chore is chore:
            self._chore = None
            if error is None:
                self._tend()
            else:
                self._loop.call_later(AGAIN_S, self._tend)

    def _submit(self, command: KeyspaceCommand, settle: Settle) -> None:
        try:
            self._driver.submit(KEYSPACE, encode(command), settle, internal=True)
        except DoyenError as error:
            self._loop.call_later(AGAIN_S, settle, 0, None, error)
