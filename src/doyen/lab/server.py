"""One simulated server: a core, its disk, its clock, and whoever carries out what the core says.

It does in virtual time what a node's driver does in real time, and keeps to the same contract: a
message waits for the disk where it must, effects keep their order, the core hears of its writes
when they are durable. Beyond that it can be stopped anywhere: killed between two effects, frozen,
restarted from what its disk kept. Its clock is its own: true time times a rate, with jumps.

Imports the words of consensus and the rest of the lab below the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappush
from math import inf
from typing import TYPE_CHECKING, Any

from doyen.lab.disk import Rotten
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
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferFailed,
)
from doyen.quorum.consensus.invariants import check

if TYPE_CHECKING:
    from doyen.lab.network import SimulatedLink
    from doyen.lab.world import World

__all__ = ["SimulatedServer"]

_NUMBERS = {kind: number for number, kind in enumerate(CoreEvent.__subclasses__())}
_ELAPSED = Elapsed()
_GRAIN = 1e-9
_SNAPSHOT_S = 0.05
_BINDING = frozenset(
    ["Vote", "VoteReply", "Stand", "LeaderInfo", "AckEpoch", "Promise", "DoViewChange"]
)
"""Messages that may bind their sender to a candidate."""
_CHECK_EVERY = 64
"""Events between two looks at everything that a core knows of itself: they cost the length of its
log. What may break between cores is looked at after every event."""


class SimulatedServer:
    """A server of the world."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.id = name
        self.number = number
        self.links: dict[str, SimulatedLink] = {}
        self.disk = world.make_disk()
        self.core: Core | None = None
        self.life = 0
        """Which process this is, counted from 1."""
        self.gone = False
        """It will not start again: its disk is rotten."""
        self.machine = RegisterMachine()
        self.applied = 0
        self.paused = 0
        self.backlog: list[tuple[Callable[[Any], object], Any]] = []
        self.fuse = -1
        """How many more effects are carried out before it is killed; negative: no fuse."""
        self.fuse_waits = False
        """The fuse burns only from the next writing of the core's state on."""
        self.fuse_told = True
        self.fuse_down_s = 0.0
        self.downs = 0
        self._unchecked = 0
        self.was_leading = False
        """Whether it is the last that was elected, and neither died nor gave up for a reason."""
        self.rng = stream(world.noise, name)
        self._base = self.rng.uniform(0.0, 1000.0)
        self._anchor = 0.0
        self._rate = 1.0
        self._latest = 0.0
        self._doing: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Persist: self._persist,
            Committed: self._committed,
            RoleChanged: self._role_changed,
            Accepted: self._accepted,
            ProposalRefused: self._refused,
            ReadReady: self._read_ready,
            ReadRefused: self._read_refused,
            SendSnapshot: self._send_snapshot,
            Install: self._install,
            TransferFailed: _nothing,
        }

    # The clock.

    def clock(self) -> float:
        """Its own time."""
        return self._base + (self.world.now - self._anchor) * self._rate

    def adjust(self, *, rate: float | None = None, jump_s: float = 0.0) -> None:
        """From now on its clock runs at another rate, or has jumped ahead."""
        self._base = self.clock() + jump_s
        self._anchor = self.world.now
        if rate is not None:
            self._rate = rate
        if self.core is not None:
            self._armed = inf
            self._arm(self.core.next_deadline)

    def _arm(self, deadline: float) -> None:
        self._armed = deadline
        if deadline < inf:
            at = self._anchor + (deadline - self._base) / self._rate
            world = self.world
            world.seq += 1
            heappush(
                world.heap, (max(at, world.now), world.seq, self._timer, (self.life, deadline))
            )

    def _timer(self, due: tuple[int, float]) -> None:
        life, armed = due
        if life != self.life or armed != self._armed or self.core is None:
            return
        if self.paused:
            self.backlog.append((self._timer, due))
            return
        self._armed = inf
        deadline = self.core.next_deadline
        now = self.clock()
        if now < deadline - _GRAIN:
            self._arm(deadline)
            return
        self._latest = max(self._latest, deadline)
        self.handle(_ELAPSED)

    # The life of the process.

    def start(self) -> None:
        """Start the process, from what the disk has kept."""
        if self.core is not None or self.gone:
            return
        world = self.world
        try:
            recovered = self.disk.recover()
        except Rotten as rotten:
            self.gone = True
            world.tell(self.id, f"refuses to start: {rotten}")
            return
        self.life += 1
        self.machine = RegisterMachine()
        self.applied = 0
        if recovered.snapshot is not None:
            self.machine = self.disk.image.copy()
            self.applied = recovered.snapshot.index
        self._snapshot_index = self.applied
        self.membership = (
            world.membership if recovered.snapshot is None else recovered.snapshot.membership
        )
        self._durable = self._token = 0
        self._syncing = 0
        self._held: list[Send] = []
        self._waiting: dict[int, tuple[int, WorkloadRequest]] = {}
        self._reads: dict[int, WorkloadRequest] = {}
        self._lagging: list[tuple[int, WorkloadRequest]] = []
        self._asking: WorkloadRequest | None = None
        self._next_read = 1
        self._latest = self.clock()
        self._armed = inf
        self.core = world.make_core(
            self.id, self.membership, recovered, jitter=self.rng.random, now=self._latest
        )
        self._cluster = world.checkers.cluster
        self._cluster.started(self.core, recovered)
        self._arm(self.core.next_deadline)
        world.network.reach()

    def stop(self, *, told: bool) -> None:
        """Kill the process, or, if nobody is told, the machine under it."""
        if self.core is None:
            return
        self.core = None
        self.was_leading = False
        if self.fuse >= 0:
            self.fuse = -1
            self.downs -= 1
        self.backlog.clear()
        self._cluster.crashed(self.id)
        self.disk.crash(self.rng)
        self.world.checkers.kept(self)
        self.world.network.ended(self, told=told)

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.paused -= 1
        if not self.paused:
            backlog, self.backlog = self.backlog, []
            life = self.life
            for do, argument in backlog:
                if self.core is None or self.life != life:
                    break
                do(argument)

    # What happens to it.

    def take(self, event: CoreEvent) -> None:
        if self.core is None:
            return
        if self.paused:
            self.backlog.append((self.take, event))
            return
        self.handle(event)

    def handle(self, event: CoreEvent) -> None:
        """Have the core take in an event, carry out what it says, and let the checkers look."""
        core = self.core
        assert core is not None
        world = self.world
        now = self._base + (world.now - self._anchor) * self._rate
        if now < self._latest:
            now = self._latest
        else:
            self._latest = now
        effects = core.handle(event, now)
        world.trace = hash(
            (
                world.trace,
                world.now,
                self.number,
                _NUMBERS[type(event)],
                core.generation,
                core.commit,
                len(effects),
            )
        )
        if world.listener is not None:
            world.listener(self, event, effects)
        if effects:
            self._cluster.stepped(core, effects)
            if core.commit > world.checked:
                world.checkers.agreed(self)
            self._carry_out(effects)
            if self.core is None:
                return
        self._unchecked += 1
        if self._unchecked >= _CHECK_EVERY:
            self._unchecked = 0
            check(core)
        deadline = core.next_deadline
        if deadline < self._armed:
            self._arm(deadline)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        doing = self._doing
        for effect in effects:
            if self.fuse >= 0 and self._burns(effect):
                return
            doing[type(effect)](effect)

    def _burns(self, effect: Effect) -> bool:
        """Whether the fuse burns down before this effect."""
        if self.fuse_waits:
            self.fuse_waits = not (type(effect) is Persist and effect.state is not None)
            return False
        if self.fuse == 0:
            self.world.blow(self)
            return True
        self.fuse -= 1
        return False

    def _send(self, effect: Send) -> None:
        if effect.after > self._durable:
            self._held.append(effect)
            return
        link = self.links.get(effect.peer)
        if link is not None:
            world = self.world
            if type(effect.message).__name__ in _BINDING:
                self._cluster.sent(self.id, effect)
            if world.measure is not None:
                world.measure(effect.message)
            world.network.send(link, Received(self.id, effect.message))

    # The disk.

    def _persist(self, effect: Persist | Install) -> None:
        self.disk.queue.append(effect)
        self._token = effect.token
        if not self._syncing:
            self._sync()

    def _sync(self) -> None:
        self._syncing = len(self.disk.queue)
        world = self.world
        took = world.fsync_s * (0.5 + self.rng.random()) + self.disk.stall_s
        self.disk.until = world.now + took
        world.push(self.disk.until, self._synced, (self.life, self._syncing))

    def _synced(self, what: tuple[int, int]) -> None:
        life, count = what
        if life != self.life or self.core is None:
            return
        state = self.disk.state
        token = self.disk.settle(count)
        if self.disk.state is not state:
            self.world.checkers.kept(self)
        if self.paused:
            self.backlog.append((self._durable_to, token))
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
                    if self.fuse >= 0 and self._burns(send):
                        return
                    self._send(send)
        self._syncing = 0
        if self.disk.queue:
            self._sync()
        self.handle(Persisted(token))

    def fail_sync(self) -> None:
        """The disk reports an error."""
        if self.core is not None and self.disk.failed(self.rng):
            self.stop(told=True)

    # What has been agreed on.

    def _committed(self, effect: Committed) -> None:
        world = self.world
        machine = self.machine
        for index, entry in enumerate(effect.entries, effect.first):
            if entry.kind == EntryKind.COMMANDS:
                result = machine.apply(entry.data)
            else:
                result = None
                if entry.kind == EntryKind.MEMBERSHIP:
                    self.membership = membership_of(entry.data)
            self.applied = index
            waiting = self._waiting.pop(index, None)
            if waiting is not None:
                generation, request = waiting
                if generation == entry.generation:
                    world.answer(self, request, result, index)
                else:
                    world.refuse(request, self.core.leader if self.core else None)
        if self._lagging:
            self._answer_reads()
        if (
            world.protocol.snapshots
            and self.applied - self._snapshot_index >= world.plan.compact_every
        ):
            self.compact()

    def compact(self) -> None:
        """Take a snapshot of what has been applied."""
        if self.applied <= self._snapshot_index or not self.world.protocol.snapshots:
            return
        self._snapshot_index = self.applied
        last: LogEntry = self.world.checkers.log[self.applied - 1]
        snapshot = Snapshot(self.applied, last.generation, self.membership)
        what = (self.life, snapshot, self.machine.copy())
        self.world.push(self.world.now + _SNAPSHOT_S + self.disk.stall_s, self._compacted, what)

    def _compacted(self, what: tuple[int, Snapshot, RegisterMachine]) -> None:
        life, snapshot, image = what
        if life == self.life and self.core is not None and snapshot.index > self.disk.base:
            self.disk.compact(snapshot, image)
            self.take(Compacted(snapshot))

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        link = self.links.get(effect.peer)
        snapshot, image = self.disk.snapshot, self.disk.image
        if link is None or snapshot is None:
            return
        world = self.world
        what = (link, self.life, effect.generation, snapshot, image)
        world.push(world.now + _SNAPSHOT_S + world.network.latency(), self._streamed, what)

    def _streamed(self, what: tuple[SimulatedLink, int, int, Snapshot, RegisterMachine]) -> None:
        link, life, generation, snapshot, image = what
        target = link.target
        arrived = target.core is not None and not link.cuts and link.connected
        if arrived and life == self.life:
            target.disk.received[snapshot.index] = (snapshot, image)
            target.take(SnapshotReceived(self.id, generation, snapshot))
        heard = arrived and not target.links[self.id].cuts
        sent = SnapshotSent(link.target.id, snapshot, heard)
        if life == self.life:
            self.world.push(self.world.now + self.world.network.latency(), self.take, sent)

    def _install(self, effect: Install) -> None:
        _, image = self.disk.received[effect.snapshot.index]
        self.world.checkers.restored(self, effect.snapshot, image.digest)
        self.machine = image.copy()
        self.applied = self._snapshot_index = effect.snapshot.index
        self.membership = effect.snapshot.membership
        self._persist(effect)
        self._answer_reads()

    # Clients.

    def asked(self, request: WorkloadRequest) -> None:
        """A client's request has arrived."""
        core = self.core
        if core is None:
            return
        if self.paused:
            self.backlog.append((self.asked, request))
            return
        if request.operation.value is None:
            token = self._next_read
            self._next_read += 1
            self._reads[token] = request
            self.handle(ReadAsked(token))
        elif core.role is not Role.LEADING or self.disk.full:
            self.world.refuse(request, core.leader)
        else:
            self._asking = request
            self.handle(Propose(request.data))
            self._asking = None

    def _accepted(self, effect: Accepted) -> None:
        if self._asking is not None:
            self._waiting[effect.index] = (effect.generation, self._asking)
            self._asking = None

    def _refused(self, effect: ProposalRefused) -> None:
        if self._asking is not None:
            self.world.refuse(self._asking, None)
            self._asking = None

    def _read_ready(self, effect: ReadReady) -> None:
        request = self._reads.pop(effect.token, None)
        if request is not None:
            self._lagging.append((effect.index, request))
            self._answer_reads()

    def _answer_reads(self) -> None:
        still = []
        for index, request in self._lagging:
            if index <= self.applied:
                value = self.machine.values.get(request.operation.key)
                self.world.answer(self, request, value, self.applied)
            else:
                still.append((index, request))
        self._lagging = still

    def _read_refused(self, effect: ReadRefused) -> None:
        request = self._reads.pop(effect.token, None)
        if request is not None:
            self.world.refuse(request, self.core.leader if self.core else None)

    def _role_changed(self, effect: RoleChanged) -> None:
        assert self.core is not None
        check(self.core)
        self.world.role_changed(self, effect)


def _nothing(_: Any) -> None:
    return
