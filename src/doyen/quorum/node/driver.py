"""Carries out what a consensus core says, over a journal, a transport and a state machine.

    peers, disk, timer ──▶ core ──▶ effects, in order:  journal, transport, machine
    propose, barrier   ──▶

One place where events reach the core, and none of its effects are carried out anywhere else. It
waits, but knows no threads, files or sockets: a real node and the lab run the same code.

- **Order.** Effects are carried out in the order they were given. Sends that wait for the disk
  are held, in order, until it has said so; only then does the core hear `Persisted`.
- **Batches.** Whatever is proposed in one turn of the loop becomes one entry, encoded once. A node
  that follows sends its batches to the leader, a few at a time (`ProposalLimits.forwards`), and the
  leader makes one entry of all that has arrived in a turn.
- **Commands of the node itself** (`internal`) do not wait for clients': they have a bound of their
  own and go into an entry of their own, before all others. They are a leader's, so those of a node
  that leads no longer are dropped: the next leader may know better.
- **Bounded turns.** What is committed is applied in slices, a little in each turn, so that
  nothing waits for a long backlog, heartbeats least of all.
- **Exactly once.** A proposal keeps its request id (see `machine`) until its outcome is known, so
  it is simply proposed again whenever a leader was lost or a link broke. After `patience_s` the
  proposer is told that the outcome is unknown, or that nothing was done.
- **Reads.** `barrier` asks the core, or the leader's, up to where the log has to be applied; all
  that ask in one turn are answered by one round.
- A journal that fails ends the process (`abort`): nothing that it said is certain any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from msgspec import MsgspecError

from doyen.errors import (
    ConfigError,
    DoyenError,
    OrderFailed,
    OutcomeUnknown,
    SessionClosed,
    StoreUnavailable,
)
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import (
    Accepted,
    Committed,
    Connected,
    Core,
    CoreEvent,
    Disconnected,
    Elapsed,
    Install,
    Membership,
    Message,
    Persist,
    Persisted,
    ProposalRefused,
    Propose,
    ReadReady,
    ReadRefused,
    Received,
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferFailed,
)
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node.admin import Orders
from doyen.quorum.node.applier import Applied
from doyen.quorum.node.disk_space import Room
from doyen.quorum.node.interfaces import Journal, Status, Transport
from doyen.quorum.node.leader_calls import DONE, NOT_LEADING, REFUSED, UNKNOWN, Answer, Questions
from doyen.quorum.node.proposals import (
    Batch,
    Offers,
    ProposalLimits,
    Proposals,
    Request,
    Settle,
    decode_results,
    encode_results,
    inform,
)
from doyen.quorum.node.reads import LinearizableReads
from doyen.quorum.node.replicated import ReplicatedMachines, decode_batch, encode_batch
from doyen.quorum.node.roles import needs_admin
from doyen.quorum.node.validation import frees

__all__ = ["Answer", "Driver", "ProposalLimits", "Status"]

log = logging.getLogger("doyen.quorum.node")

Tell = Callable[..., None]
"""`tell(status, payload=b"")`."""

HANDOVERS = 15
"""How often a node that stops tries to hand over."""
RETRY_S = 0.02
"""Pause before something is tried again, unless the leader changes sooner."""


# What nodes ask the leader, by the first byte.
_PROPOSE, _READ, _SERVICE, _ORDER, _PROPOSE_AS_ADMIN = b"P", b"R", b"Q", b"O", b"A"
_ROOM = b"F"


class Driver:
    """One node's consensus, in motion. Lives on one loop and is called from there only."""

    def __init__(
        self,
        core: Core,
        journal: Journal,
        transport: Transport,
        machine: ReplicatedMachines,
        clock: Clock,
        *,
        incarnation: str,
        limits: ProposalLimits = ProposalLimits(),  # noqa: B008  (frozen)
        abort: Callable[[BaseException], None],
    ) -> None:
        """`incarnation` tells this run of this node from every other. `abort` ends the process."""
        self.core = core
        self.id = core.id
        self.machine = machine
        self.limits = limits
        self._journal = journal
        self._transport = transport
        self._now = clock.now
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ended = False
        self._stopping = False

        self._events: deque[CoreEvent] = deque()
        self._stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._durable = 0
        self._held: deque[Send] = deque()
        self._applied = Applied(machine, journal, core.founders, limits, self)
        self._reached = core.membership, self._applied.membership
        self._required = 0
        self.copy = self._applied.copy
        self._proposals = Proposals(core.id, incarnation, limits)
        self._sweeper: asyncio.TimerHandle | None = None
        self._offers = Offers(limits)
        self._offering: Batch | None = None
        self._refusal = ""
        # Entries of ours that are in the log, by index.
        self._waiting: dict[int, Batch] = {}
        self._flushing = False
        self._forwarding = 0
        """Batches of ours that the leader has not answered."""
        self._retry: asyncio.TimerHandle | None = None

        self._reads = LinearizableReads(self, self._ask_index)
        self._questions = Questions(self, transport, limits.patience_s)
        tell = lambda leader, report: self._questions.put(leader, _ROOM + report)  # noqa: E731
        self._room = Room(self, journal, limits, clock.now, tell)
        self.without_room = self._room.without

        self._on_role: list[Callable[[Role, int, str | None], None]] = []
        self._on_applied: list[Callable[[int], None]] = []
        self._on_question: Callable[[bytes, Answer], None] | None = None
        self._orders = orders = Orders(
            self, lambda order: self._questions.ask_leader(_ORDER + order)
        )
        self.arrange, self.transfer = orders.arrange, orders.transfer
        self.add, self.promote, self.remove = orders.add, orders.promote, orders.remove
        self._role_changed: asyncio.Future[None] = self._loop.create_future()

        self._carry_out: dict[type, Callable[[Any], None]] = {
            Persist: journal.persist,
            Send: self._send,
            Committed: self._applied.commit,
            RoleChanged: self._role_change,
            Accepted: self._accept,
            ProposalRefused: self._refuse,
            ReadReady: self._reads.ready,
            ReadRefused: self._reads.refused,
            TransferFailed: self._transfer_failed,
            SendSnapshot: self._send_snapshot,
            Install: self._applied.install,
        }

    # Life.

    async def start(self) -> None:
        """Restore what a snapshot holds, and take part."""
        await self._applied.start()
        self._require()
        self._journal.start(self._persisted, self.fail)
        self._transport.start(
            self._received, self._connected, self._disconnected, self.asked, self._streamed
        )
        self._reach()
        self._arm()

    async def stop(self, handover_s: float = 5.0) -> None:
        """Take leave: hand leadership over, see what is under way through, and close."""
        if not self._ended:
            self._stopping = True
            with suppress(TimeoutError):
                async with asyncio.timeout(handover_s):
                    await self._hand_over()
                    # Once this node is removed, no answer comes to what it has forwarded.
                    while self._proposals and self.id in self.membership.everyone:
                        await self.pause()
        self.crash()
        await self._transport.close()
        await self._journal.close()

    async def _hand_over(self) -> None:
        """Try to have another lead: for a moment it may be that nobody can."""
        for _ in range(HANDOVERS):
            if self.role is not Role.LEADING or len(self.core.membership.voters) == 1:
                return
            with suppress(OrderFailed, OutcomeUnknown, StoreUnavailable):
                await self.transfer()
            await self.pause()
        log.warning("node %s stops without having handed over", self.id)

    def crash(self) -> None:
        """End at once, and do nothing any more, as a process that is killed."""
        self._ended = True
        self._questions.end()
        self._room.end()
        for timer in (self._timer, self._sweeper, self._retry):
            if timer is not None:
                timer.cancel()
        for task in [*self._tasks]:
            task.cancel()
        self._proposals.refuse_all(f"node {self.id} has stopped")
        self._reads.clear()
        if not self._role_changed.done():
            self._role_changed.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nothing is certain any more."""
        if not self._ended:
            trace = None if isinstance(error, OSError | DoyenError) else error
            log.critical("node %s cannot go on: %s", self.id, error, exc_info=trace)
            self.crash()
            self._abort(error)

    def start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # What people may know.

    @property
    def role(self) -> Role:
        return self.core.role

    @property
    def generation(self) -> int:
        return self.core.generation

    @property
    def leader(self) -> str | None:
        return self.core.leader

    @property
    def applied(self) -> int:
        """The index that the machine has come to."""
        return self._applied.index

    @property
    def membership(self) -> Membership:
        return self.core.membership

    def supported(self) -> int:
        """The newest version of the replicated state that every member supports, as far as this
        node knows: one that is not connected counts as one that supports none."""
        supports = self._transport.supports
        return min(
            NEWEST if peer == self.id else supports(peer) for peer in self.membership.everyone
        )

    def status(self) -> Status:
        """How this node is doing."""
        core = self.core
        return Status(
            self.id,
            core.role,
            core.generation,
            core.leader,
            core.commit,
            self._applied.index,
            self._applied.snapshot,
            len(self._proposals),
            self._journal.full(),
            core.membership,
        )

    def on_role(self, callback: Callable[[Role, int, str | None], None]) -> None:
        """Call with role, generation and leader at every change of one of them."""
        self._on_role.append(callback)

    def off_role(self, callback: Callable[[Role, int, str | None], None]) -> None:
        """No longer call this."""
        self._on_role = [each for each in self._on_role if each is not callback]

    def on_applied(self, callback: Callable[[int], None]) -> None:
        """Call when the machine has moved on, with the index it has come to."""
        self._on_applied.append(callback)

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None:
        """Have questions of `ask_leader` answered by this while this node leads."""
        self._on_question = handler

    # Events reach the core.

    def tell_core(self, event: CoreEvent) -> None:
        """The one place where the core is told something."""
        if self._ended:
            return
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        core, carry_out, events = self.core, self._carry_out, self._events
        try:
            while events:
                for effect in core.handle(events.popleft(), self._now()):
                    carry_out[type(effect)](effect)
        except Exception as error:  # noqa: BLE001 - a defect: half an event is no state to go on from
            self.fail(error)
            return
        finally:
            self._stepping = False
        if core.next_deadline < self._timer_at:
            self._arm()
        if core.membership is not self._reached[0]:
            self._reach()
        self._applied.go_on()

    def _received(self, peer: str, message: Message) -> None:
        if self._journal.full() is not self._room.full:
            self._room.look()
        self.tell_core(Received(peer, message))

    def _connected(self, peer: str) -> None:
        self.tell_core(Connected(peer))

    def _disconnected(self, peer: str) -> None:
        self.tell_core(Disconnected(peer))

    def _persisted(self, token: int) -> None:
        if self._ended:
            return
        self._durable = token
        if self._journal.full() is not self._room.full:
            self._room.look()
        held = self._held
        while held and held[0].after <= token:
            send = held.popleft()
            self._transport.send(send.peer, send.message)
        self.tell_core(Persisted(token))

    def _arm(self) -> None:
        """Have the timer ring at the core's deadline. One that rings too early is left alone."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self.core.next_deadline
        if self._timer_at == inf:
            self._timer = None
            return
        wait = max(self._timer_at - self._now(), 1e-6)
        self._timer = self._loop.call_later(wait, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._timer_at = inf
        if self._now() >= self.core.next_deadline:
            self.tell_core(Elapsed())
        if self._timer_at == inf and not self._ended:
            self._arm()

    def _reach(self) -> None:
        """Be connected to all members. Until a change is committed, both the old and the new ones
        take part: whoever leaves has to acknowledge and to hear of it."""
        self._reached = latest, committed = self.core.membership, self._applied.membership
        self._transport.reach(
            {
                peer: members.addresses.get(peer, "")
                for members in (committed, latest)
                for peer in members.everyone
                if peer != self.id
            }
        )

    def _require(self) -> None:
        """Have peers refused that do not support the cluster's version."""
        self._required = self.machine.version
        self._transport.require(self._required)

    # Effects.

    def _send(self, effect: Send) -> None:
        if effect.after > self._durable:
            self._held.append(effect)
        else:
            self._transport.send(effect.peer, effect.message)

    def _role_change(self, effect: RoleChanged) -> None:
        self._room.role_changed()
        changed, self._role_changed = self._role_changed, self._loop.create_future()
        changed.set_result(None)
        if effect.leader not in (None, self.id):
            self._orders.transferred()
        self._questions.lead_by(effect.leader)
        self.flush_soon()
        for callback in self._on_role:
            inform(callback, effect.role, effect.generation, effect.leader)

    def _accept(self, effect: Accepted) -> None:
        batch = self._offering
        if batch is not None:
            batch.generation = effect.generation
            before, self._waiting[effect.index] = self._waiting.get(effect.index), batch
            self._offering = None
            if before is not None:  # of when we led before: whoever led meanwhile has cut it off
                self._again(before)

    def _refuse(self, effect: ProposalRefused) -> None:
        if self._offering is None:
            self._orders.transferred(effect.reason)
        self._refusal = effect.reason

    def _transfer_failed(self, effect: TransferFailed) -> None:
        self._room.stays()
        self._orders.transferred(effect.reason)
        self.flush_soon()

    # What is committed is applied; see `applied`.

    def when_applied(self, index: int, call: Callable[[], None]) -> None:
        """Call as soon as the machine has come to `index`, at once if it has."""
        self._applied.when(index, call)

    def take_own(self, index: int, generation: int) -> Batch | None:
        batch = self._waiting.pop(index, None)
        if batch is not None and batch.generation != generation:
            self._again(batch)
            return None
        return batch

    def settle(self, batch: Batch, results: list[Any]) -> None:
        at = 0
        for answer, count in batch.answers:
            answer(DONE, encode_results(results[at : at + count]))
            at += count
        if batch.proposals:
            self._proposals.settle(batch, results[at:])

    def entered(self, generation: int, index: int) -> None:
        self._again_if(lambda at, batch: at >= index and batch.generation < generation)

    def replaced(self, index: int) -> None:
        self._again_if(lambda at, _: at <= index)

    def _again_if(self, lost: Callable[[int, Batch], bool]) -> None:
        for at in [at for at, batch in self._waiting.items() if lost(at, batch)]:
            self._again(self._waiting.pop(at))

    def _again(self, batch: Batch) -> None:
        """An entry of ours was not committed, or went by unseen: its proposals go round again,
        under the same ids."""
        _tell(batch, UNKNOWN)
        self._proposals.again(batch)
        self.flush_soon()

    def moved_on(self, index: int) -> None:
        if self.machine.version != self._required:
            self._require()
        if self._applied.membership is not self._reached[1]:
            self._reach()
        for callback in self._on_applied:
            inform(callback, index)
        if self._offers or self._proposals.waiting:
            self.flush_soon()

    # Proposals.

    async def propose(self, target: int, body: bytes, *, request: Request | None = None) -> Any:
        """Have the state machine `target` carry out `body`, on every node; return its result.
        `request` is the id of a client that keeps its own count. Raises `CommandFailed` with the
        machine's own error; `StoreUnavailable` if it was certainly not carried out;
        `OutcomeUnknown` if nobody could say within `patience_s`.
        """
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(_: int, value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        self.submit(target, body, settle, request=request)
        return await future

    def submit(
        self,
        target: int,
        body: bytes,
        settle: Settle,
        *,
        request: Request | None = None,
        internal: bool = False,
    ) -> None:
        """`propose`, with the outcome told to `settle`. `internal` commands are those of the node
        itself, which wait for no client's."""
        self._check_open()
        self.machine.check(target)
        deadline = self._now() + self.limits.patience_s
        self._proposals.add(target, body, settle, request, deadline, internal=internal)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self.limits.patience_s, self._sweep)
        if not self._flushing:
            self.flush_soon()

    def _check_open(self) -> None:
        if self._stopping or self._ended:
            raise SessionClosed(f"node {self.id} is stopping; ask another")

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._now()
        due = self._proposals.sweep(now, self.too_late())
        if due is not None:
            self._sweeper = self._loop.call_later(max(due - now, 1e-3), self._sweep)

    def too_late(self) -> str:
        """What to say of something that has taken too long."""
        leader = f"leader: {self.leader}" if self.leader else "no leader is known"
        return f"not confirmed after {self.limits.patience_s:g} s on node {self.id} ({leader})"

    def flush_soon(self) -> None:
        """Have what has gathered go on its way, once in this turn."""
        if not self._flushing and not self._ended:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def flush_after_pause(self) -> None:
        if self._retry is None and not self._ended:
            self._retry = self._loop.call_later(RETRY_S, self._flush_retry)

    def _flush_retry(self) -> None:
        self._retry = None
        self.flush_soon()

    def _flush(self) -> None:
        """Once per turn: everything that has gathered goes to the core, or to the leader."""
        self._flushing = False
        if self._ended:
            return
        self._reads.flush()
        leader = self.core.leader
        if self.core.role is Role.LEADING:
            self._flush_to_core()
        else:
            while self._offers:
                _tell(self._offers.take(), NOT_LEADING)
            self._proposals.refuse_internal(f"node {self.id} leads no longer")
            if leader is not None:
                self._flush_to_leader(leader)

    def _flush_to_leader(self, leader: str) -> None:
        """A batch is sent at once, up to a few at a time: were every turn's sent by itself, the
        leader would have as many entries, and on a slow disk they would pile up there."""
        proposals, applied = self._proposals, self._applied.index
        while proposals.waiting and self._forwarding < self.limits.forwards:
            batch = proposals.gather(applied)
            if batch is not None:
                self._forwarding += 1
                self.start_task(self._forward(leader, batch))

    def _flush_to_core(self) -> None:
        proposals, waiting = self._proposals, self._waiting
        while proposals.internal_waiting:
            own = proposals.gather(self._applied.index, internal=True)
            if own is not None and not self._enter(own):
                return
        if (reason := self._room.refusal()) and (self._offers or proposals.clients_waiting):
            self._refuse_for_room(reason)
        while (self._offers or proposals.clients_waiting) and len(waiting) < self.limits.pipeline:
            batch, data = self._offers.next_entry(proposals, self._applied.index)
            if batch is not None and not self._enter(batch, data):
                return

    def _enter(self, batch: Batch, data: bytes = b"") -> bool:
        """Whether the core takes a batch as an entry. If not, it is tried again, here or by the
        peers that it came from."""
        if self.offer(Propose(data or encode_batch(batch.commands)), batch) is None:
            return True
        _tell(batch, NOT_LEADING)
        self._proposals.again(batch)
        self.flush_after_pause()
        return False

    def offer(self, event: CoreEvent, batch: Batch) -> str | None:
        """Tell the core. Returns why it refused; otherwise `batch` waits for its entry."""
        self._offering, self._refusal = batch, ""
        batch.tried()
        self.tell_core(event)
        refused, self._offering = self._offering is not None, None
        if not refused:
            return None
        batch.tried(-1)
        return self._refusal or f"node {self.id} is not leading"

    async def _forward(self, leader: str, batch: Batch) -> None:
        """Have the leader propose a batch of ours."""
        try:
            await self._have_proposed(leader, batch)
        finally:
            self._forwarding -= 1
        if self._proposals.waiting:
            self.flush_soon()

    async def _have_proposed(self, leader: str, batch: Batch) -> None:
        batch.tried()
        tag = _PROPOSE_AS_ADMIN if needs_admin(batch.commands) else _PROPOSE
        answer = await self._questions.put(leader, tag + encode_batch(batch.commands))
        status, payload = answer[0], answer[1:]
        if status == DONE:
            self._proposals.settle(batch, decode_results(payload))
            return
        if status != UNKNOWN:
            batch.tried(-1)
        if status == REFUSED:
            # It refuses a batch as a whole, for lack of room say; what frees some may go alone.
            freeing, rest = batch.parted(frees)
            self._proposals.refuse(rest if rest.commands else freeing, payload.decode())
            if freeing.commands and rest.commands:
                await self._have_proposed(leader, freeing)
            return
        self._proposals.again(batch)
        if self.core.leader == leader:
            await self.pause()

    def _refuse_for_room(self, reason: str) -> None:
        """There is no room: say so, and let another lead who may have some."""
        spares = self._room.spares
        for batch in self._offers.take_out(spares):
            _tell(batch, REFUSED, reason)
        self._proposals.refuse_waiting(reason, spares)
        self._room.hand_over_soon()

    # Reads.

    async def barrier(self) -> None:
        """When this returns, the machine of this very node shows every write that was acknowledged
        before the call. Raises `StoreUnavailable` if no leader answered within `patience_s`."""
        done: asyncio.Future[None] = self._loop.create_future()
        self.when_current(lambda: None if done.done() else done.set_result(None))
        try:
            async with asyncio.timeout(self.limits.patience_s):
                await done
        except TimeoutError:
            raise StoreUnavailable(f"the read was {self.too_late()}") from None

    def when_current(self, call: Callable[[], None]) -> None:
        """`barrier`, telling `call`. It may never be told."""
        self._check_open()
        self._reads.add(lambda index: self.when_applied(index, call))

    async def _ask_index(self, leader: str) -> int | None:
        answer = await self._questions.put(leader, _READ)
        return int.from_bytes(answer[1:]) if answer[0] == DONE else None

    # Questions to whoever leads.

    async def ask_leader(self, question: bytes) -> bytes:
        """Put a question to the handler (`on_question`) of the node that leads, maybe this one.
        Raises `StoreUnavailable` if it was certainly not heard, `OutcomeUnknown` if the link broke
        before the answer came."""
        return await self._questions.ask_leader(_SERVICE + question)

    async def pause(self, within_s: float = RETRY_S) -> None:
        """Until the role changes, or a moment."""
        await asyncio.wait({self._role_changed}, timeout=within_s)

    def asked(self, peer: str, question: bytes, answer: Answer) -> None:
        """A peer asks whoever leads."""
        if self._ended:
            return

        def tell(status: int, payload: bytes = b"") -> None:
            answer(bytes([status]) + payload)

        tag, body = question[:1], question[1:]
        if self.core.role is not Role.LEADING:
            tell(NOT_LEADING)
        elif tag in (_PROPOSE, _PROPOSE_AS_ADMIN):
            self._asked_to_propose(body, tell, as_admin=tag == _PROPOSE_AS_ADMIN)
        elif tag == _READ:
            self._reads.add(lambda index: tell(DONE, index.to_bytes(8)))
        elif tag == _SERVICE and self._on_question is not None:
            self._on_question(body, lambda given: tell(DONE, given))
        elif tag == _ROOM:
            self._room.heard(peer, body)
            tell(DONE)
        elif tag == _ORDER:
            done, batch = partial(tell, DONE), Batch([], [], tell)
            refuse = lambda reason: tell(REFUSED, reason.encode())  # noqa: E731
            self.start_task(self._orders.obey(body, done, refuse, batch))
        else:
            tell(REFUSED, b"the leader does not know such a question")

    def _asked_to_propose(self, data: bytes, tell: Tell, *, as_admin: bool) -> None:
        try:
            commands = decode_batch(data)
            for target in {command.target for command in commands}:
                self.machine.check(target)
        except (MsgspecError, ConfigError) as error:
            tell(REFUSED, f"the leader cannot propose this batch: {error}".encode())
            return
        if needs_admin(commands) and not as_admin:
            tell(REFUSED, b"an administrator's command, forwarded without that role")
            return
        if not self._offers.add(data, Batch(commands, [], tell)):
            tell(REFUSED, b"the leader has more proposals than it can take")
            return
        self.flush_soon()

    # Snapshots.

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        self.start_task(self._stream(effect.peer, effect.generation))

    async def _stream(self, peer: str, generation: int) -> None:
        snapshot, pieces = await self._journal.read_snapshot()

        def done(ok: bool) -> None:
            self.tell_core(SnapshotSent(peer, snapshot, ok))

        self._transport.send_snapshot(peer, generation, snapshot, pieces, done)

    async def _streamed(
        self, peer: str, generation: int, snapshot: Snapshot, pieces: AsyncIterator[bytes]
    ) -> None:
        """A leader sends a snapshot."""
        await self._journal.receive_snapshot(snapshot, pieces)
        self.tell_core(SnapshotReceived(peer, generation, snapshot))


def _tell(batch: Batch, status: int, reason: str = "") -> None:
    """Tell the peers that a batch, or parts of it, came from."""
    for answer, _ in batch.answers:
        answer(status, reason.encode())
