"""A small cluster of Raft cores in which the test chooses every step.

Nothing happens by itself: a test delivers, loses or repeats a message, completes a write of a disk,
crashes a server (which loses what is not on its disk), or reaches a deadline. `Chaos` chooses at
random, from one seed, and `heal` then runs everything in order. After every event the invariants
are checked, and what was acknowledged is compared with a simple model: a list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
    Compacted,
    Connected,
    CoreEvent,
    Disconnected,
    Effect,
    Elapsed,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Persist,
    Persisted,
    Propose,
    ReadAsked,
    ReadReady,
    Received,
    Recovered,
    Role,
    Send,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
)
from doyen.quorum.consensus.invariants import ClusterView, InvariantBroken, check, check_step, facts
from doyen.quorum.consensus.raft import Raft, RaftSettings
from doyen.quorum.consensus.raft.messages import Vote, VoteReply

SETTINGS = RaftSettings(
    message_entries=3, message_bytes=64, window_messages=4, window_bytes=256, tail_entries=2
)


def vote_in(effect: Send) -> tuple[int, str] | None:
    """Whether a message binds its sender to a candidate: '' is the sender itself."""
    message = effect.message
    if type(message) is VoteReply and message.granted:
        return message.generation, effect.peer
    if type(message) is Vote:
        return message.generation, ""
    return None


class Disk:
    """What is on disk, and what waits to be written."""

    def __init__(self) -> None:
        self.state: Any = None
        self.snapshot: Snapshot | None = None
        self.entries: list[LogEntry] = []
        self.queue: list[Persist | Install | Compacted] = []

    @property
    def base(self) -> int:
        return self.snapshot.index if self.snapshot is not None else 0

    def sync(self, count: int) -> int:
        """Write the first `count` of the waiting writes; returns the last token among them, or
        0."""
        token = 0
        for write in self.queue[:count]:
            if isinstance(write, Compacted):
                if write.snapshot.index > self.base:
                    del self.entries[: write.snapshot.index - self.base]
                    self.snapshot = write.snapshot
            elif isinstance(write, Install):
                self.snapshot, self.entries = write.snapshot, []
                token = write.token
            else:
                if write.state is not None:
                    self.state = write.state
                if write.first:
                    skip = max(0, self.base + 1 - write.first)
                    place = write.first + skip - self.base - 1
                    assert place <= len(self.entries), "a hole in the log on disk"
                    self.entries[place:] = write.entries[skip:]
                token = write.token
        del self.queue[:count]
        return token

    def recovered(self) -> Recovered:
        return Recovered(self.state, self.snapshot, tuple(self.entries))


class Box:
    """One server's machine."""

    def __init__(self, name: str, membership: Membership) -> None:
        self.name = name
        self.membership = membership
        self.core: Raft | None = None
        self.disk = Disk()
        self.held: list[Send] = []
        self.applied = 0
        self.memberships: list[tuple[int, Membership]] = []


Parcel = tuple[str, str, Any]
"""The sender, the receiver, and a message or a snapshot with its generation."""


class RaftCluster:
    """Servers, their disks, and the messages in flight between them."""

    def __init__(
        self,
        voters: Sequence[str],
        *,
        joiners: Sequence[str] = (),
        make: type[Raft] = Raft,
        settings: RaftSettings = SETTINGS,
        jitter: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self.now = 0.0
        self.make = make
        self.settings = settings
        self.jitter = jitter
        self.checker = ClusterView(vote_in=vote_in)
        self.flying: list[Parcel] = []
        self.cuts: set[tuple[str, str]] = set()
        self.accepted: dict[tuple[int, int], bytes] = {}
        self.reads: dict[int, int] = {}
        self.served: list[int] = []
        self.events = 0
        self.seen: Callable[[str, Effect], None] = lambda name, effect: None
        founders = Membership(tuple(voters))
        self.boxes = {name: Box(name, founders) for name in voters}
        self.boxes.update({name: Box(name, Membership(())) for name in joiners})
        for name in self.boxes:
            self.start(name)

    def core(self, name: str) -> Raft:
        core = self.boxes[name].core
        assert core is not None, f"{name} is down"
        return core

    @property
    def up(self) -> list[Raft]:
        return [box.core for box in self.boxes.values() if box.core is not None]

    @property
    def leaders(self) -> list[Raft]:
        return [core for core in self.up if core.role is Role.LEADING]

    # What can happen.

    def start(self, name: str) -> None:
        box = self.boxes[name]
        recovered = box.disk.recovered()
        core = self.make(
            name,
            box.membership,
            recovered,
            settings=self.settings,
            jitter=self.jitter,
            now=self.now,
        )
        box.core = core
        box.applied = core.commit
        base = recovered.snapshot.membership if recovered.snapshot else box.membership
        box.memberships = [(core.commit, base)]
        self.checker.started(core, recovered)

    def crash(self, name: str, keep: int = 0) -> None:
        """Crash. The first `keep` of the waiting writes reached the disk, unconfirmed."""
        box = self.boxes[name]
        box.disk.sync(keep)
        box.disk.queue.clear()
        box.held.clear()
        box.core = None
        self.checker.crashed(name)

    def tell(self, name: str, event: CoreEvent) -> list[Effect]:
        """Have the server handle an event, and carry out its effects."""
        core = self.core(name)
        before = facts(core)
        self.events += 1
        effects = core.handle(event, self.now)
        check(core)
        check_step(before, core)
        for effect in effects:
            self.seen(name, effect)
            self._carry_out(self.boxes[name], event, effect)
        self.checker.stepped(core, effects)
        return effects

    def _carry_out(self, box: Box, event: CoreEvent, effect: Effect) -> None:
        name = box.name
        if isinstance(effect, Send):
            if effect.after and any(
                isinstance(write, Persist | Install) and write.token <= effect.after
                for write in box.disk.queue
            ):
                box.held.append(effect)
            else:
                self._post(name, effect)
        elif isinstance(effect, Persist | Install):
            box.disk.queue.append(effect)
            if isinstance(effect, Install):
                box.applied = effect.snapshot.index
                box.memberships = [(effect.snapshot.index, effect.snapshot.membership)]
        elif isinstance(effect, Committed):
            self._apply(box, effect)
        elif isinstance(effect, Accepted):
            if isinstance(event, Propose):
                self.accepted[effect.index, effect.generation] = event.data
        elif isinstance(effect, ReadReady):
            if effect.index < self.reads[effect.token]:
                raise InvariantBroken(
                    f"{name} answers a read with {effect.index}, asked when "
                    f"{self.reads[effect.token]} was committed: stale"
                )
            self.served.append(effect.token)
        elif isinstance(effect, SendSnapshot):
            snapshot = box.disk.snapshot
            assert snapshot is not None, "there is no snapshot to send"
            self.flying.append((name, effect.peer, (effect.generation, snapshot)))

    def _apply(self, box: Box, effect: Committed) -> None:
        for index, entry in enumerate(effect.entries, effect.first):
            data = self.accepted.get((index, entry.generation))
            if data is not None and entry.data != data:
                raise InvariantBroken(f"{box.name} applies {entry.data!r} in place of {data!r}")
            if entry.kind == EntryKind.MEMBERSHIP:
                membership = msgspec.msgpack.decode(entry.data, type=Membership)
                box.memberships.append((index, membership))
            box.applied = index

    def _post(self, name: str, effect: Send) -> None:
        self.checker.sent(name, effect)
        if (name, effect.peer) not in self.cuts:
            self.flying.append((name, effect.peer, effect.message))

    def sync(self, name: str, count: int = 1 << 30) -> None:
        """The disk completes some of the waiting writes: messages that waited are sent, then the
        core gets `Persisted`."""
        box = self.boxes[name]
        token = box.disk.sync(count)
        if token and box.core is not None:
            ready = [send for send in box.held if send.after <= token]
            box.held = [send for send in box.held if send.after > token]
            for send in ready:
                self._post(name, send)
            self.tell(name, Persisted(token))

    def deliver(self, place: int = 0, *, again: bool = False) -> None:
        sender, receiver, what = self.flying[place]
        if self.boxes[receiver].core is None:
            self.lose(place)
            return
        if not again:
            del self.flying[place]
        if not isinstance(what, tuple):
            self.tell(receiver, Received(sender, what))
            return
        generation, snapshot = what
        self.tell(receiver, SnapshotReceived(sender, generation, snapshot))
        if self.boxes[sender].core is not None and not again:
            self.tell(sender, SnapshotSent(receiver, snapshot, True))

    def lose(self, place: int = 0) -> None:
        sender, receiver, what = self.flying.pop(place)
        if isinstance(what, tuple) and self.boxes[sender].core is not None:
            self.tell(sender, SnapshotSent(receiver, what[1], False))

    def elapse(self, name: str) -> None:
        """The server's deadline comes."""
        core = self.core(name)
        if core.next_deadline < float("inf"):
            self.now = max(self.now, core.next_deadline)
            self.tell(name, Elapsed())

    def ask_read(self, name: str, token: int) -> None:
        self.reads[token] = len(self.checker.committed)
        self.tell(name, ReadAsked(token))

    def compact(self, name: str) -> None:
        """Take a snapshot of what is applied; it is on disk after what was written before."""
        box = self.boxes[name]
        core = self.core(name)
        if box.applied > box.disk.base and core.log.generation_at(box.applied) > 0:
            membership = next(m for at, m in reversed(box.memberships) if at <= box.applied)
            snapshot = Snapshot(box.applied, core.log.generation_at(box.applied), membership)
            event = Compacted(snapshot)
            box.disk.queue.append(event)
            if len(box.disk.queue) == 1:
                box.disk.sync(1)
            else:
                self.sync(name)
            self.tell(name, event)

    def cut(self, one: str, other: str) -> None:
        self.cuts |= {(one, other), (other, one)}

    # Running without faults.

    def settle(self, rounds: int = 10_000) -> None:
        """Deliver and write everything, in order, with no time passing."""
        for _ in range(rounds):
            busy = [name for name, box in self.boxes.items() if box.core and box.disk.queue]
            if self.flying:
                self.deliver()
            elif busy:
                for name in busy:
                    self.sync(name)
            else:
                return
        raise AssertionError("the cluster never comes to rest")

    def run(self, seconds: float) -> None:
        """Let time pass, with everything delivered and written at once."""
        end = self.now + seconds
        self.settle()
        while True:
            core = min(self.up, key=lambda core: core.next_deadline)
            if core.next_deadline > end:
                self.now = end
                return
            self.elapse(core.id)
            self.settle()

    def heal(self) -> Raft:
        """All servers are up and connected: there must soon be a leader that makes progress."""
        self.cuts.clear()
        for name, box in self.boxes.items():
            if box.core is None:
                self.start(name)
        for name in self.boxes:
            for other in self.boxes:
                if name != other:
                    self.tell(name, Connected(other))
        self.run(12 * self.settings.election_timeout_s)
        assert len(self.leaders) == 1, f"leaders: {[core.id for core in self.leaders]}"
        leader = self.leaders[0]
        generation = leader.generation
        self.tell(leader.id, Propose(b"healed"))
        self.ask_read(leader.id, -1)
        self.run(3 * self.settings.election_timeout_s)
        assert leader.role is Role.LEADING
        assert leader.generation == generation, "a healthy leader was deposed"
        assert -1 in self.served, "a read was never answered"
        assert self.checker.committed[-1].data == b"healed"
        for name in leader.membership.everyone:
            core = self.core(name)
            assert core.commit == leader.commit, f"{name}: {core.commit} of {leader.commit}"
        return leader


class Chaos:
    """A cluster with random faults, from one seed."""

    def __init__(self, rng: random.Random, make: type[Raft] = Raft) -> None:
        self.rng = rng
        names = ["a", "b", "c", "d", "e"]
        founding = rng.choice([1, 2, 3, 3, 3, 4, 5, 5])
        joiners = names[founding:] if rng.random() < 0.6 else []
        self.cluster = RaftCluster(
            names[:founding],
            joiners=joiners,
            make=make,
            settings=msgspec.structs.replace(SETTINGS, message_entries=rng.choice([1, 3])),
            jitter=rng.random,
        )
        self.proposals = 0
        self.tokens = 0
        if rng.random() < 0.2:
            # Leaders fail before they have replicated anything.
            self.odds = {
                self.deliver: 60,
                self.sync: 40,
                self.elapse: 4,
                self.propose: 2,
                self.behead: 2,
                self.start: 4,
                self.change: rng.choice([0, 0, 10]),
            }
            return
        # Swarm testing: every run leaves out some kinds of faults, so that others occur more often.
        self.odds = {
            self.deliver: 60,
            self.sync: 25,
            self.elapse: rng.choice([3, 6, 8]),
            self.propose: rng.choice([2, 6]),
            self.lose: rng.choice([0, 2, 10]),
            self.repeat: rng.choice([0, 3]),
            self.crash: rng.choice([0, 1, 4]),
            self.behead: rng.choice([0, 0, 3]),
            self.start: 4,
            self.read: rng.choice([0, 6, 6]),
            self.disconnect: rng.choice([0, 2]),
            self.connect: 2,
            self.change: rng.choice([0, 2, 6, 20]) if joiners or founding > 1 else 0,
            self.transfer: rng.choice([0, 0, 2]),
            self.compact: rng.choice([0, 0, 3]),
            self.cut: rng.choice([0, 1, 3]),
            self.mend: 1,
        }

    def run(self, steps: int) -> RaftCluster:
        acts, weights = list(self.odds), list(self.odds.values())
        for act in self.rng.choices(acts, weights, k=steps):
            act()
        return self.cluster

    def some(self) -> str | None:
        up = [name for name, box in self.cluster.boxes.items() if box.core is not None]
        return self.rng.choice(up) if up else None

    def deliver(self) -> None:
        flying = self.cluster.flying
        if flying:
            # Mostly in order, sometimes not.
            late = self.rng.random() < 0.3
            self.cluster.deliver(self.rng.randrange(len(flying)) if late else 0)

    def repeat(self) -> None:
        if self.cluster.flying:
            self.cluster.deliver(self.rng.randrange(len(self.cluster.flying)), again=True)

    def lose(self) -> None:
        if self.cluster.flying:
            self.cluster.lose(self.rng.randrange(len(self.cluster.flying)))

    def sync(self) -> None:
        busy = [n for n, box in self.cluster.boxes.items() if box.core and box.disk.queue]
        if busy:
            name = self.rng.choice(busy)
            count = self.rng.randint(1, len(self.cluster.boxes[name].disk.queue))
            self.cluster.sync(name, count)

    def elapse(self) -> None:
        if name := self.some():
            self.cluster.elapse(name)

    def propose(self) -> None:
        leaders = self.cluster.leaders
        if leaders:
            self.proposals += 1
            data = b"%d" % self.proposals * self.rng.choice([1, 1, 20])
            self.cluster.tell(self.rng.choice(leaders).id, Propose(data))

    def read(self) -> None:
        if name := self.some():
            leaders = self.cluster.leaders
            if leaders and self.rng.random() < 0.8:
                name = self.rng.choice(leaders).id
            self.tokens += 1
            self.cluster.ask_read(name, self.tokens)

    def crash(self) -> None:
        if name := self.some():
            waiting = len(self.cluster.boxes[name].disk.queue)
            self.cluster.crash(name, self.rng.randint(0, waiting))
            if self.rng.random() < 0.5:
                for other in self.cluster.up:
                    self.cluster.tell(other.id, Disconnected(name))

    def behead(self) -> None:
        """The leader crashes, with everything that it had not written or sent."""
        if self.cluster.leaders:
            self.cluster.crash(self.rng.choice(self.cluster.leaders).id)

    def start(self) -> None:
        down = [name for name, box in self.cluster.boxes.items() if box.core is None]
        if down:
            self.cluster.start(self.rng.choice(down))

    def disconnect(self) -> None:
        name, other = self.some(), self.some()
        if name and other and name != other:
            self.cluster.tell(name, Disconnected(other))

    def connect(self) -> None:
        name, other = self.some(), self.some()
        if name and other and name != other:
            self.cluster.tell(name, Connected(other))

    def change(self) -> None:
        leaders = self.cluster.leaders
        if not leaders:
            return
        leader = self.rng.choice(leaders)
        old = leader.membership
        name = self.rng.choice(list(self.cluster.boxes))
        voters = [voter for voter in old.voters if voter != name]
        learners = [learner for learner in old.learners if learner != name]
        if name not in old.everyone:
            (learners if self.rng.random() < 0.5 else voters).append(name)
        elif name in old.learners or self.rng.random() < 0.2:
            (voters if self.rng.random() < 0.7 else learners).append(name)
        self.cluster.tell(leader.id, ChangeAsked(Membership(tuple(voters), tuple(learners))))

    def transfer(self) -> None:
        leaders = self.cluster.leaders
        if leaders:
            to = self.rng.choice([*self.cluster.boxes, ""])
            self.cluster.tell(self.rng.choice(leaders).id, TransferAsked(to))

    def compact(self) -> None:
        if name := self.some():
            self.cluster.compact(name)

    def cut(self) -> None:
        name, other = self.some(), self.some()
        if name and other and name != other:
            self.cluster.cuts.add((name, other))
            if self.rng.random() < 0.7:
                self.cluster.cuts.add((other, name))

    def mend(self) -> None:
        self.cluster.cuts.clear()


def chaos(seed: int, make: type[Raft] = Raft, steps: int = 1500) -> RaftCluster:
    """One run of random faults, then of healing. Raises if a check fails."""
    cluster = Chaos(random.Random(seed), make).run(steps)
    cluster.heal()
    return cluster
