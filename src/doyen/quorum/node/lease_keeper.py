"""What the leader does for the keyspace: its era, renewals of leases, ends of leases, and upkeep.

A new leader first begins an era of the keyspace. It confirms no renewal before that, and each one
only after a majority has shown, since the renewal arrived, that this node still leads. A lease
whose time is over on the leader's clock (see `lease_clock`) is ended by a command that has no
effect in any other era.

Upkeep is one command at a time. It raises the cluster's version once all members support a newer
one, sets the quota that this node was given, and removes the keys of ended leases, a slice at a
time.

`Renewals` takes the renewals of a node's clients to the node that leads, those of one turn of the
event loop in one call; `LeaseLooks` asks it what is left of leases. All live on the driver's event
loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
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
from doyen.quorum.node.clients import ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.leader_calls import Answer
from doyen.quorum.node.lease_clock import LeaseClock
from doyen.quorum.node.proposals import Settle
from doyen.quorum.node.replicated import KEYSPACE
from doyen.quorum.protocol.requests import (
    MAX_LEASES,
    ErrorCode,
    LeaseRenewed,
    LeaseTimes,
    LeaseTimesRequest,
    RenewLease,
)

TIMER_S: Final = 1e-3
"""The shortest wait for the end of a lease."""
RETRY_S: Final = 0.01
"""Pause before a command is proposed again."""
LOOK_S: Final = 0.05
"""While leases that are over wait for the ends of others, the interval at which the leader looks
whether it was paused."""
CHECK_S: Final = 1.0
"""How often a leader checks whether all members support a newer version."""
LOOKS: Final = 8
"""Requests of one client for what is left of leases that may be under way."""
ENDS: Final = 2
"""Commands under way at a time that end leases whose time is over. Each ends a slice of them
(`lease_clock.AT_ONCE`), so no node stops while a hundred thousand leases end."""

CONFIRMED, GONE, NOT_NOW = 0, 1, 2
"""The verdict on a renewal: it counts; its lease has ended; ask again."""

LEFT: Final = "left"
"""The key of a question for what is left of leases. Nodes of the first release do not know it, and
answer it with nothing."""

decode_leases: Callable[[bytes], list[int]] = msgspec.msgpack.Decoder(list[int]).decode
decode_question: Callable[[bytes], list[int] | dict[str, list[int]]] = msgspec.msgpack.Decoder(
    list[int] | dict[str, list[int]]
).decode
decode_left: Callable[[bytes], list[float | None]] = msgspec.msgpack.Decoder(
    list[float | None]
).decode


class KeyspaceLeases:
    """Keeps the leases while this node leads."""

    def __init__(self, driver: Driver, keyspace: Keyspace, clock: Clock, quota_bytes: int) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._quota_bytes = quota_bytes
        self._now = clock.now
        self._loop = asyncio.get_running_loop()
        self._leading = False
        self._generation = 0
        self._beginning = 0
        """The era that was proposed and has not begun."""
        self._era = 0
        self._clock: LeaseClock | None = None
        """Set while this node leads and the keyspace is in its era."""
        self._early: list[tuple[list[int], float, Answer]] = []
        """Renewals that arrived before the era has begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._ends = 0
        """Commands under way that end leases whose time is over."""
        self._upkeep: KeyspaceCommand | None = None
        """The command of the upkeep that is under way."""
        self._checking: asyncio.TimerHandle | None = None
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
            # Proposed before any write of a client, whose meaning may depend on the version: the
            # first version does not remember large results.
            if (command := self._raise()) is not None:
                self._submit(command, lambda *_: None)

    def _leave(self) -> None:
        self._leading = False
        self._clock = None
        self._beginning = 0
        self._upkeep = None
        if self._checking is not None:
            self._checking.cancel()
        self._cancel_timer()
        early, self._early = self._early, []
        for leases, _, answer in early:
            answer(encode([NOT_NOW] * len(leases)))

    def _begin(self) -> None:
        """Propose an era of this node."""
        self._clock = None
        self._beginning = era = self._keyspace.era + 1
        self._submit(BeginEra(era), partial(self._begun, era))

    def _begun(self, era: int, _: int, result: Any, error: BaseException | None) -> None:
        if not self._leading or era != self._beginning:
            return
        if error is not None or isinstance(decode_result(result), ConditionFailed):
            # An earlier leader has begun one meanwhile, or the outcome is unknown, or the disk is
            # full and would refuse the command again at once.
            self._loop.call_later(RETRY_S, self._retry_begin, era)
            return
        self._beginning = 0
        self._era = era
        self._clock = LeaseClock(self._keyspace)
        self._ends = 0
        self._take_in()
        self._check()
        early, self._early = self._early, []
        for leases, arrived_at, answer in early:
            self._renew(leases, arrived_at, answer)

    def _retry_begin(self, era: int) -> None:
        if self._leading and era == self._beginning:
            self._begin()

    def applied(self, index: int) -> None:
        """Commands have been applied to the keyspace."""
        clock, keyspace = self._clock, self._keyspace
        if clock is None:
            return
        if keyspace.era != self._era:
            self._begin()
            return
        if clock.ending:
            clock.settle()
        if keyspace.newest_lease > clock.taken_in:
            self._take_in()
        if self._upkeep is None and (
            keyspace.ended or keyspace.version < NEWEST or keyspace.quota != self._quota_bytes
        ):
            self._start_upkeep()

    def _take_in(self) -> None:
        clock = self._clock
        if clock is not None:
            if clock.take_in(self._now()):
                self._loop.call_soon(self._take_in)
            self._set_timer()

    # Renewals.

    def asked(self, question: bytes, answer: Answer) -> None:
        """A node forwards renewals to this one, which leads, or asks what is left of leases."""
        arrived_at = self._now()
        try:
            leases = decode_question(question)
        except MsgspecError:
            answer(b"")
            return
        if isinstance(leases, dict):
            answer(encode(self._left(leases.get(LEFT, []), arrived_at)))
            return
        if self._clock is None:
            if self._leading:
                self._early.append((leases, arrived_at, answer))
            else:
                answer(encode([NOT_NOW] * len(leases)))
            return
        self._renew(leases, arrived_at, answer)

    def _left(self, leases: list[int], now: float) -> list[float | None]:
        clock = self._clock
        return [None if clock is None else clock.left(lease, now) for lease in leases]

    def _renew(self, leases: list[int], arrived_at: float, answer: Answer) -> None:
        clock = self._clock
        if clock is None:
            answer(encode([NOT_NOW] * len(leases)))
            return
        in_time = [clock.renew(lease, arrived_at) for lease in leases]

        def confirm() -> None:
            if self._clock is not clock or self._keyspace.era != self._era:
                answer(encode([NOT_NOW] * len(leases)))
                return
            answer(
                encode(
                    [
                        CONFIRMED
                        if timely and clock.confirmed(lease)
                        else GONE
                        if self._keyspace.lease(lease) is None
                        else NOT_NOW
                        for lease, timely in zip(leases, in_time, strict=True)
                    ]
                )
            )

        try:
            self._driver.when_current(confirm)
        except DoyenError:
            answer(encode([NOT_NOW] * len(leases)))

    # Ends.

    def _set_timer(self) -> None:
        """Wait for the next deadline. A timer that is set for an earlier one stays: if every grant
        set it anew, no lease would end while there are many."""
        at = inf if self._clock is None else self._clock.next_deadline
        if self._ends >= ENDS:
            at = max(at, self._now() + LOOK_S)
        if at < self._timer_at:
            self._cancel_timer()
            wait_s = max(at - self._now(), TIMER_S)
            self._timer = self._loop.call_later(wait_s, self._timer_fired)
            self._timer_at = at

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def _timer_fired(self) -> None:
        # Two turns of the loop, so that renewals which have arrived are handled before any lease
        # is found to be over.
        self._timer = self._loop.call_later(0, self._timer_last_turn)

    def _timer_last_turn(self) -> None:
        self._timer = self._loop.call_later(0, self._end_due)

    def _end_due(self) -> None:
        self._cancel_timer()
        clock = self._clock
        if clock is None:
            return
        now = self._now()
        clock.look(now)
        while self._ends < ENDS and (leases := clock.due(now)):
            self._ends += 1
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
        """The outcome of the end of some leases. If it failed, it is proposed again: these leases
        are not renewed any more, and ending one twice is harmless. If it was refused, the keyspace
        is in another era, and the time of all leases starts anew."""
        if self._clock is not clock:
            return
        if error is not None:
            self._loop.call_later(RETRY_S, self._end, clock, leases)
        elif isinstance(decode_result(result), ConditionFailed):
            self._begin()
        else:
            self._ends -= 1
            clock.settle()
            self._set_timer()

    # Upkeep.

    def _check(self) -> None:
        """Start upkeep now and, while the version may rise, at intervals: which members are
        connected changes without anything being applied."""
        self._start_upkeep()
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        if self._clock is not None and self._keyspace.version < NEWEST:
            self._checking = self._loop.call_later(CHECK_S, self._check)

    def _start_upkeep(self) -> None:
        """Propose the next command of the upkeep, if there is one."""
        if self._clock is not None and self._upkeep is None:
            self._upkeep = command = self._next_upkeep()
            if command is not None:
                self._submit(command, partial(self._upkeep_done, command))

    def _next_upkeep(self) -> KeyspaceCommand | None:
        keyspace = self._keyspace
        if keyspace.ended:
            return RemoveEndedKeys()
        if (command := self._raise()) is not None:
            return command
        if keyspace.version > FIRST and keyspace.quota != self._quota_bytes:
            return SetQuota(self._quota_bytes)
        return None

    def _raise(self) -> RaiseVersion | None:
        """The command that raises the version, if it may rise."""
        version = self._keyspace.version
        if version < NEWEST and (supported := min(self._driver.supported(), NEWEST)) > version:
            return RaiseVersion(supported)
        return None

    def _upkeep_done(
        self, command: KeyspaceCommand, _: int, result: Any, error: BaseException | None
    ) -> None:
        if self._upkeep is command:
            self._upkeep = None
            if error is None:
                self._start_upkeep()
            else:
                self._loop.call_later(RETRY_S, self._start_upkeep)

    def _submit(self, command: KeyspaceCommand, settle: Settle) -> None:
        try:
            self._driver.submit(KEYSPACE, encode(command), settle, internal=True)
        except DoyenError as error:
            self._loop.call_later(RETRY_S, settle, None, None, error)


class RenewalClient(Protocol):
    """A client that waits for renewals, such as `ServedClient`."""

    @property
    def connection(self) -> Any:
        """Has `closed`, which says that the client waits no longer."""

    def send(self, answer: Any) -> None:
        """The lease was renewed."""

    def fail(self, request: int, code: ErrorCode, text: str) -> None:
        """The lease was not renewed."""


Waiting = dict[int, list[tuple[RenewalClient, int]]]
"""Client and request id of each renewal, by lease."""


class Renewals:
    """The renewals that this node's clients ask for."""

    def __init__(
        self,
        driver: Driver,
        election_s: float,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`start` runs a task."""
        self._driver = driver
        self._election_s = election_s
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._waiting: Waiting = {}

    def renew(self, client: RenewalClient, request: RenewLease) -> None:
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.setdefault(request.lease, []).append((client, request.id))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._start(self._renew(waiting))

    async def _renew(self, waiting: Waiting) -> None:
        """Call the leader. While the leader changes, retry for two election timeouts."""
        give_up_at = self._loop.time() + 2 * self._election_s
        while waiting:
            verdicts, why = await self._call_leader([*waiting])
            retried: Waiting = {}
            late = self._loop.time() > give_up_at
            for (lease, askers), verdict in zip(waiting.items(), verdicts, strict=True):
                if verdict == NOT_NOW and not late:
                    if askers := [each for each in askers if not each[0].connection.closed]:
                        retried[lease] = askers
                    continue
                for client, request in askers:
                    if verdict == CONFIRMED:
                        client.send(LeaseRenewed(request))
                    elif verdict == GONE:
                        client.fail(request, ErrorCode.LEASE_GONE, f"the lease {lease} has ended")
                    else:
                        client.fail(request, ErrorCode.UNAVAILABLE, why)
            waiting = retried
            if waiting:
                await asyncio.sleep(RETRY_S)

    async def _call_leader(self, leases: list[int]) -> tuple[list[int], str]:
        """The verdict on each lease, and why if it is `NOT_NOW`."""
        try:
            verdicts = decode_leases(await self._driver.ask_leader(encode(leases)))
        except (DoyenError, MsgspecError) as error:
            return [NOT_NOW] * len(leases), str(error)
        if len(verdicts) != len(leases):
            verdicts = [NOT_NOW] * len(leases)
        return verdicts, "the leader has changed, or is about to end this lease"


Look = tuple[ServedClient, int, tuple[int, ...]]
"""A client, the id of its request, and the leases."""


class LeaseLooks:
    """What is left of leases, for this node's clients. One call to the leader is under way at a
    time, for all that was asked meanwhile: without a bound, these calls would crowd out renewals
    and writes."""

    def __init__(self, driver: Driver, start: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`start` runs a task."""
        self._driver = driver
        self._start = start
        self._waiting: deque[Look] = deque()
        self._calling = False

    def look(self, client: ServedClient, request: LeaseTimesRequest) -> None:
        if client.looks >= LOOKS:
            text = f"{LOOKS} requests for what is left of leases are under way for this client"
            client.fail(request.id, ErrorCode.UNAVAILABLE, text)
            return
        client.looks += 1
        self._waiting.append((client, request.id, request.leases[:MAX_LEASES]))
        if not self._calling:
            self._calling = True
            self._start(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._waiting:
                looks: list[Look] = []
                leases: list[int] = []
                while self._waiting and len(leases) < MAX_LEASES:
                    looks.append(self._waiting.popleft())
                    leases += looks[-1][2]
                await self._answer(looks, leases)
        finally:
            self._calling = False

    async def _answer(self, looks: list[Look], leases: list[int]) -> None:
        left: list[float | None] = []
        failure = ""
        try:
            left = decode_left(await self._driver.ask_leader(encode({LEFT: leases})))
        except DoyenError as error:
            failure = str(error)
        except MsgspecError:
            pass  # a leader of the first release
        for client, request, own in looks:
            client.looks -= 1
            if failure:
                client.fail(request, ErrorCode.UNAVAILABLE, failure)
            else:
                client.send(LeaseTimes(request, tuple(left[: len(own)])))
                del left[: len(own)]
