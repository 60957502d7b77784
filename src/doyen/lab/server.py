"""One simulated server: a core, its disk and its clock, and the process that runs the core.

A `ServerProcess` does in virtual time what a node's driver does in real time, and keeps the same
contract: a message waits for the disk where it must, effects keep their order, and the core learns
of its writes when they are durable. A `SimulatedServer` is the machine: it can lose the process
between any two effects, pause it, and start the next one from what the disk kept. Its clock is its
own: true time multiplied by a rate, with jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappush
from math import inf
from typing import TYPE_CHECKING, Any

from doyen.lab.disk import CorruptDisk
from doyen.lab.event_queue import EventQueue
from doyen.lab.plan import stream
from doyen.lab.workload import RegisterMachine, WorkloadRequest, membership_of
from doyen.quorum.consensus.core import (
    Accepted,
    Committed,
    Compacted,
    Core,
    CoreEvent,
    Effect,
    Elapsed,
    EntryKind,
    Install,
    LogEntry,
    Persist,
    Persisted,
    ProposalRefused,
    Propose,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Received,
    Recovered,
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferFailed,
    TransferRefused,
)
from doyen.quorum.consensus.invariants import check

if TYPE_CHECKING:
    from doyen.lab.faults import PendingCrash
    from doyen.lab.network import SimulatedLink
    from doyen.lab.world import World

_NUMBERS = {kind: number for number, kind in enumerate(CoreEvent.__subclasses__())}
_ELAPSED = Elapsed()
_TOLERANCE_S = 1e-9
_SNAPSHOT_S = 0.05
_BINDING = frozenset(
    ["Vote", "VoteReply", "Stand", "LeaderInfo", "AckEpoch", "Promise", "DoViewChange"]
)
"""Messages that may bind their sender to a candidate."""
_CHECK_EVERY = 64
"""Events between two complete checks of a core's own invariants, which take time in proportion to
its log. What concerns several cores is checked after every event."""


class ServerClock:
    """A clock that runs at its own rate and can jump ahead."""

    __slots__ = ("_anchor", "_base", "_queue", "_rate")

    def __init__(self, queue: EventQueue, base: float) -> None:
        self._queue = queue
        self._base = base
        self._anchor = 0.0
        self._rate = 1.0

    def now(self) -> float:
        return self._base + (self._queue.now - self._anchor) * self._rate

    def true_time(self, reading: float) -> float:
        """When, in true time, the clock has this reading."""
        return self._anchor + (reading - self._base) / self._rate

    def adjust(self, rate: float | None, jump_s: float) -> None:
        self._base = self.now() + jump_s
        self._anchor = self._queue.now
        if rate is not None:
            self._rate = rate


class SimulatedServer:
    """A machine, and the process on it while there is one."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.id = name
        self.number = number
        self.links: dict[str, SimulatedLink] = {}
        self.disk = world.protocol.make_disk()
        self.rng = stream(world.noise, name)
        self.clock = ServerClock(world.queue, self.rng.uniform(0.0, 1000.0))
        self.process: ServerProcess | None = None
        self.unrecoverable = False
        """The disk is corrupt, so the server never starts again."""
        self.paused = 0
        """The number of faults that pause the process at present."""
        self.backlog: list[tuple[Callable[[Any], object], Any]] = []
        """What arrived while the process was paused."""
        self.pending_crash: PendingCrash | None = None
        self.pending_restarts = 0
        """The number of faults that keep the server down, or are about to."""
        self.was_leading = False
        """Whether it was elected last, and has neither stopped nor stepped down for a reason."""
        self.unchecked = 0
        """Events since the last complete check of the core."""

    @property
    def core(self) -> Core | None:
        return self.process.core if self.process is not None else None

    def adjust_clock(self, *, rate: float | None = None, jump_s: float = 0.0) -> None:
        """From now on the clock runs at another rate, or has jumped ahead."""
        self.clock.adjust(rate, jump_s)
        if self.world.observer is not None:
            self.world.observer.clock_adjusted(self.id, rate, jump_s)
        if self.process is not None:
            self.process.clock_adjusted()

    def start(self) -> None:
        """Start a process from what the disk has kept."""
        if self.process is not None or self.unrecoverable:
            return
        try:
            recovered = self.disk.recover()
        except CorruptDisk as error:
            self.unrecoverable = True
            self.world.report(self.id, f"refuses to start: {error}")
            return
        self.process = ServerProcess(self, recovered)
        if self.world.observer is not None:
            self.world.observer.started(self.id, self.process.core, recovered)
        self.process.start(recovered)
        self.world.network.reconnect()

    def stop(self, *, power_loss: bool) -> None:
        """Kill the process. Its kernel closes its connections, unless the machine loses power."""
        if self.process is None:
            return
        self.process = None
        if self.world.observer is not None:
            self.world.observer.stopped(self.id)
        self.was_leading = False
        if self.pending_crash is not None:
            self.pending_crash = None
            self.pending_restarts -= 1
        self.backlog.clear()
        self.world.checkers.cluster.crashed(self.id)
        self.disk.crash(self.rng)
        self.world.checkers.check_durable(self)
        self.world.network.stopped(self, power_loss=power_loss)

    def fail_sync(self) -> None:
        """A sync of the disk fails."""
        if self.process is not None and self.disk.failed(self.rng):
            self.stop(power_loss=False)

    def pause(self) -> None:
        self.paused += 1
        if self.world.observer is not None:
            self.world.observer.paused(self.id, True)

    def resume(self) -> None:
        self.paused -= 1
        if not self.paused:
            if self.world.observer is not None:
                self.world.observer.paused(self.id, False)
            backlog, self.backlog = self.backlog, []
            process = self.process
            for call, argument in backlog:
                if process is None or self.process is not process:
                    break
                call(argument)

    def receive(self, event: CoreEvent) -> None:
        """An event arrives for the core."""
        process = self.process
        if process is None:
            return
        if self.paused:
            self.backlog.append((self.receive, event))
            return
        process.handle(event)

    def receive_request(self, request: WorkloadRequest) -> None:
        """A client's request arrives."""
        if self.process is None:
            return
        if self.paused:
            self.backlog.append((self.receive_request, request))
            return
        self.process.requests.receive(request)


class ServerProcess:
    """Runs a core from one start of a server to its end."""

    def __init__(self, server: SimulatedServer, recovered: Recovered) -> None:
        self.server = server
        self._world = world = server.world
        self._queue = world.queue
        self._cluster = world.checkers.cluster
        snapshot = recovered.snapshot
        self.machine = RegisterMachine() if snapshot is None else server.disk.image.copy()
        self.applied = self._snapshot_index = 0 if snapshot is None else snapshot.index
        self._membership = world.membership if snapshot is None else snapshot.membership
        self._durable = 0
        """The token of the last write that is on disk."""
        self._syncing = 0
        """The number of writes that the sync under way makes durable."""
        self._held: list[Send] = []
        """Messages that wait until a write is on disk."""
        self._latest = server.clock.now()
        """The latest time that the core has seen: time must not go backwards for it."""
        self._armed = inf
        """The deadline for which a timer is pending."""
        self.core: Core = world.protocol.make(
            server.id,
            self._membership,
            recovered,
            settings=world.settings,
            jitter=server.rng.random,
            now=self._latest,
        )
        self.requests = PendingRequests(self)
        self._effects: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Persist: self._persist,
            Committed: self._committed,
            RoleChanged: self._role_changed,
            Accepted: self.requests.accepted,
            ProposalRefused: self.requests.proposal_refused,
            ReadReady: self.requests.read_ready,
            ReadRefused: self.requests.read_refused,
            SendSnapshot: self._send_snapshot,
            Install: self._install,
            TransferRefused: lambda _: None,
            TransferFailed: lambda _: None,
        }

    @property
    def running(self) -> bool:
        return self.server.process is self

    def start(self, recovered: Recovered) -> None:
        self._cluster.started(self.core, recovered)
        self._arm(self.core.next_deadline)

    # Time.

    def clock_adjusted(self) -> None:
        self._armed = inf
        self._arm(self.core.next_deadline)

    def _arm(self, deadline: float) -> None:
        self._armed = deadline
        if deadline < inf:
            queue = self._queue
            at = max(self.server.clock.true_time(deadline), queue.now)
            queue.seq += 1
            heappush(queue.heap, (at, queue.seq, self._timer, deadline))

    def _timer(self, armed: float) -> None:
        server = self.server
        if server.process is not self or armed != self._armed:
            return
        if server.paused:
            server.backlog.append((self._timer, armed))
            return
        self._armed = inf
        deadline = self.core.next_deadline
        if server.clock.now() < deadline - _TOLERANCE_S:
            self._arm(deadline)
            return
        self._latest = max(self._latest, deadline)
        self.handle(_ELAPSED)

    # The core.

    def handle(self, event: CoreEvent) -> None:
        """Have the core handle an event, carry out its effects, and check the invariants."""
        core = self.core
        server = self.server
        world = self._world
        queue = self._queue
        now = server.clock.now()
        if now < self._latest:
            now = self._latest
        else:
            self._latest = now
        effects = core.handle(event, now)
        queue.trace = hash(
            (
                queue.trace,
                queue.now,
                server.number,
                _NUMBERS[type(event)],
                core.generation,
                core.commit,
                len(effects),
            )
        )
        if world.on_step is not None:
            world.on_step(server, event, effects)
        if world.observer is not None:
            world.observer.stepped(server.id, core, event, effects)
        if effects:
            self._cluster.stepped(core, effects)
            if core.commit > world.checkers.checked:
                world.checkers.committed(server)
            self._carry_out(effects)
            if server.process is not self:
                return
        server.unchecked += 1
        if server.unchecked >= _CHECK_EVERY:
            server.unchecked = 0
            check(core)
        deadline = core.next_deadline
        if deadline < self._armed:
            self._arm(deadline)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        server, table = self.server, self._effects
        for effect in effects:
            if server.pending_crash is not None and self._crashes_before(effect):
                return
            table[type(effect)](effect)

    def _crashes_before(self, effect: Effect) -> bool:
        """Count this effect towards the pending crash. True if the process is killed before it."""
        crash = self.server.pending_crash
        assert crash is not None
        if crash.after_state_write:
            crash.after_state_write = not (type(effect) is Persist and effect.state is not None)
            return False
        if crash.effects == 0:
            self._world.crash(self.server)
            return True
        crash.effects -= 1
        return False

    def _send(self, effect: Send) -> None:
        if effect.after > self._durable:
            self._held.append(effect)
            return
        server = self.server
        link = server.links.get(effect.peer)
        if link is not None:
            world = self._world
            if type(effect.message).__name__ in _BINDING:
                self._cluster.sent(server.id, effect)
            if world.on_message is not None:
                world.on_message(effect.message)
            world.network.send(link, Received(server.id, effect.message))

    def _role_changed(self, effect: RoleChanged) -> None:
        check(self.core)
        self._world.role_changed(self.server, effect)

    # The disk.

    def _persist(self, effect: Persist | Install) -> None:
        self.server.disk.queue.append(effect)
        if not self._syncing:
            self._sync()

    def _sync(self) -> None:
        disk = self.server.disk
        self._syncing = len(disk.queue)
        fsync_s = self._world.plan.latencies.fsync_s
        disk.until = self._queue.now + (fsync_s * (0.5 + self.server.rng.random()) + disk.stall_s)
        self._queue.push(disk.until, self._synced, self._syncing)

    def _synced(self, count: int) -> None:
        server = self.server
        if server.process is not self:
            return
        state = server.disk.state
        token = server.disk.settle(count)
        if server.disk.state is not state:
            self._world.checkers.check_durable(server)
        if server.paused:
            server.backlog.append((self._durable_to, token))
        else:
            self._durable_to(token)

    def _durable_to(self, token: int) -> None:
        self._durable = token
        held = self._held
        if held:
            ready = [send for send in held if send.after <= token]
            if ready:
                self._held = [send for send in held if send.after > token]
                for send in ready:
                    if self.server.pending_crash is not None and self._crashes_before(send):
                        return
                    self._send(send)
        self._syncing = 0
        if self.server.disk.queue:
            self._sync()
        self.handle(Persisted(token))

    # The log.

    def _committed(self, effect: Committed) -> None:
        machine = self.machine
        for index, entry in enumerate(effect.entries, effect.first):
            if entry.kind == EntryKind.COMMANDS:
                result = machine.apply(entry.data)
            else:
                result = None
                if entry.kind == EntryKind.MEMBERSHIP:
                    self._membership = membership_of(entry.data)
            self.applied = index
            self.requests.applied(index, entry, result)
        self.requests.answer_reads()
        if (
            self._world.protocol.snapshots
            and self.applied - self._snapshot_index >= self._world.plan.compact_every
        ):
            self.compact()

    # Snapshots.

    def compact(self) -> None:
        """Take a snapshot of what has been applied."""
        if self.applied <= self._snapshot_index or not self._world.protocol.snapshots:
            return
        self._snapshot_index = self.applied
        last: LogEntry = self._world.checkers.log[self.applied - 1]
        snapshot = Snapshot(self.applied, last.generation, self._membership)
        taken = (snapshot, self.machine.copy())
        at = self._queue.now + _SNAPSHOT_S + self.server.disk.stall_s
        self._queue.push(at, self._compacted, taken)

    def _compacted(self, taken: tuple[Snapshot, RegisterMachine]) -> None:
        snapshot, image = taken
        if self.running and snapshot.index > self.server.disk.base:
            self.server.disk.compact(snapshot, image)
            self.server.receive(Compacted(snapshot))

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        link = self.server.links.get(effect.peer)
        snapshot, image = self.server.disk.snapshot, self.server.disk.image
        if link is None or snapshot is None:
            return
        sent = (link, effect.generation, snapshot, image)
        at = self._queue.now + _SNAPSHOT_S + self._world.network.latency()
        self._queue.push(at, self._snapshot_sent, sent)

    def _snapshot_sent(self, sent: tuple[SimulatedLink, int, Snapshot, RegisterMachine]) -> None:
        link, generation, snapshot, image = sent
        server, target = self.server, link.target
        arrived = target.process is not None and not link.cuts and link.connected
        if arrived and self.running:
            target.disk.received[snapshot.index] = (snapshot, image)
            target.receive(SnapshotReceived(server.id, generation, snapshot))
        acknowledged = arrived and not target.links[server.id].cuts
        if self.running:
            result = SnapshotSent(target.id, snapshot, acknowledged)
            self._queue.push_after(self._world.network.latency(), server.receive, result)

    def _install(self, effect: Install) -> None:
        _, image = self.server.disk.received[effect.snapshot.index]
        self._world.checkers.snapshot_installed(self.server, effect.snapshot, image.digest)
        self.machine = image.copy()
        self.applied = self._snapshot_index = effect.snapshot.index
        self._membership = effect.snapshot.membership
        self._persist(effect)
        self.requests.answer_reads()


class PendingRequests:
    """Clients' requests that a process has received and not answered yet."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._world = process.server.world
        self._proposing: WorkloadRequest | None = None
        """The request whose proposal the core is handling."""
        self._proposed: dict[int, tuple[int, WorkloadRequest]] = {}
        """By log index: the generation in which it was proposed, and the request."""
        self._reads: dict[int, WorkloadRequest] = {}
        """By token: reads for which the core has not yet named an index."""
        self._unapplied: list[tuple[int, WorkloadRequest]] = []
        """Reads that wait until this index has been applied."""
        self._read_token = 0

    def receive(self, request: WorkloadRequest) -> None:
        process = self._process
        if request.operation.value is None:
            self._read_token += 1
            self._reads[self._read_token] = request
            process.handle(ReadAsked(self._read_token))
        elif process.core.role is not Role.LEADING or process.server.disk.full:
            self._world.refuse(request, process.core.leader)
        else:
            self._proposing = request
            process.handle(Propose(request.data))
            self._proposing = None

    def accepted(self, effect: Accepted) -> None:
        if self._proposing is not None:
            self._proposed[effect.index] = (effect.generation, self._proposing)
            self._proposing = None

    def proposal_refused(self, effect: ProposalRefused) -> None:
        if self._proposing is not None:
            self._world.refuse(self._proposing, None)
            self._proposing = None

    def applied(self, index: int, entry: LogEntry, result: int | None) -> None:
        """Answer the request proposed at this index, if there is one."""
        proposed = self._proposed.pop(index, None)
        if proposed is not None:
            generation, request = proposed
            if generation == entry.generation:
                self._world.answer(self._process.server, request, result, index)
            else:
                self._world.refuse(request, self._leader())

    def read_ready(self, effect: ReadReady) -> None:
        request = self._reads.pop(effect.token, None)
        if request is not None:
            self._unapplied.append((effect.index, request))
            self.answer_reads()

    def read_refused(self, effect: ReadRefused) -> None:
        request = self._reads.pop(effect.token, None)
        if request is not None:
            self._world.refuse(request, self._leader())

    def answer_reads(self) -> None:
        """Answer the reads whose index has been applied."""
        if not self._unapplied:
            return
        process, waiting = self._process, []
        for index, request in self._unapplied:
            if index <= process.applied:
                value = process.machine.values.get(request.operation.key)
                self._world.answer(process.server, request, value, process.applied)
            else:
                waiting.append((index, request))
        self._unapplied = waiting

    def _leader(self) -> str | None:
        return self._process.core.leader if self._process.running else None
