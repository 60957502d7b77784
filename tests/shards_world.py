"""A world of shards in virtual time: members on links that fail, and an oracle for each event.

It is the world of `swarm`, whose processes own shards of one set. In addition the oracle demands:

- no shard has two valid owners, and no shard has two bodies in one process;
- with a barrier, all valid owners are of one generation, and a body begins only in the generation
  of the plan in the store;
- plans are written with increasing versions and tokens that do not decrease;
- no body begins while there is no plan that can be read, except by an answer that was under way.

Processes are unfit for a while: their bodies raise, or they prepare for longer than `prepare_s`. In
the world of a vandal, another program deletes the plan or overwrites it, and deletes the spec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from doyen import Session
from doyen.errors import NameTaken, StoreError
from doyen.manage.documents import Versioned
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.slots import ShardTerm
from doyen.manage.shards.spec import ShardSpec
from doyen.model import Claim, Entry, Version, encode_json, shards_key
from doyen.term import is_valid
from swarm import TTL_S, NotReached, Oracle, Process, WatchedServer, World, reached

PLAN = shards_key("jobs", "plan")
NAMES = [f"m{n}" for n in range(6)]
PREPARE_S, SLOW_S = 4.0, 10.0


class ShardOracle(Oracle):
    """Also sees every plan and every body of a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = False
        self.running: dict[int, ShardTerm] = {}
        self.plan: Versioned | None = None
        self.vandalised_at = 0.0
        self.begun = 0
        self.on_record: Callable[[], object] = lambda: None
        """Called when the record of a shard was created."""

    def vandalised(self) -> None:
        """The plan is gone. Nobody can know the version that it had."""
        self.plan = None
        self.vandalised_at = asyncio.get_running_loop().time()

    def created(self, entry: Entry) -> None:
        super().created(entry)
        if entry.key.startswith(shards_key("jobs", "at")) and entry.key.endswith("/leader"):
            self.on_record()

    def planned(self, entry: Entry) -> None:
        before, self.plan = self.plan, Versioned.decode(entry)
        if before is not None:
            if self.plan.version <= before.version:
                self.object(f"plan {self.plan.version} after {before.version}")
            if self.plan.token < before.token:
                self.object(f"a plan of token {self.plan.token} after {before.token}")
        if self.barrier and before is not None:
            old, new = ShardPlan.decode(before.body), ShardPlan.decode(self.plan.body)
            if new.generation < old.generation:
                self.object("the generation went back")

    def begins(self, term: ShardTerm) -> None:
        self.begun += 1
        if self.plan is None:
            if asyncio.get_running_loop().time() > self.vandalised_at + TTL_S / 3:
                self.object(f"{term} begins without a plan")
            return
        plan = ShardPlan.decode(self.plan.body)
        if self.barrier and term.generation != plan.generation:
            self.object(f"{term} begins in generation {plan.generation}")

    def look(self) -> None:
        super().look()
        if self.barrier:
            generations = {term.generation for term in self._valid if isinstance(term, ShardTerm)}
            if len(generations) > 1:
                self.object(f"valid at once: owners of generations {sorted(generations)}")


class ShardServer(WatchedServer):
    """Tells the oracle of plans."""

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        entry = super().put(key, value, if_version)
        if key == PLAN and entry is not None:
            assert isinstance(self.oracle, ShardOracle)
            self.oracle.planned(entry)
        return entry


class Owner(Process):
    """A member of the set."""

    def prepare(self) -> None:
        rng = self.world.rng
        self.weight = rng.choice([1.0, 1.0, 2.0])
        self.zone = rng.choice(["x", "y"])
        self.controls = True
        self.breaks = self.slow = False
        """Its bodies raise; it prepares for too long."""

    def calm(self) -> None:
        super().calm()
        self.breaks = self.slow = False

    async def act(self, session: Session) -> None:
        assert isinstance(self.world, ShardWorld)
        with suppress(NameTaken, StoreError):
            async with session.own_shards(
                "jobs",
                self.body,
                prepare=self.warm,
                name=self.name,
                weight=self.weight,
                zone=self.zone,
                control=self.controls,
            ):
                await asyncio.get_running_loop().create_future()

    async def warm(self, shard: int) -> None:
        await asyncio.sleep(SLOW_S if self.slow else self.world.rng.choice([0.0, 0.5]))

    async def body(self, term: ShardTerm) -> None:
        if self.breaks:
            raise OSError("the disk of this host is full")
        oracle = self.world.oracle
        assert isinstance(oracle, ShardOracle)
        running = self.world.running[self.name]  # type: ignore[attr-defined]
        if term.shard in running:
            oracle.object(f"two bodies of shard {term.shard} in {self.name}")
        running.add(term.shard)
        oracle.begins(term)
        try:
            with oracle.body(term):
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    if self.world.rng.random() < 0.2 and not self.crashed:
                        await asyncio.sleep(0.5)
        finally:
            running.discard(term.shard)


class ShardWorld(World):
    """A set of shards, its members, and what happens to them."""

    happenings: ClassVar = {
        "join": 4,
        "leave": 1,
        "crash": 2,
        "cut": 3,
        "heal": 4,
        "wall": 1,
        "resize": 1,
        "reweigh": 2,
        "pin": 1,
        "depose": 2,
        "break_or_mend": 2,
        "slow_down": 2,
    }
    names = NAMES

    def __init__(self, seed: int, *, barrier: bool | None = None, **spec: Any) -> None:
        super().__init__(seed)
        self.oracle: ShardOracle = ShardOracle()
        self.oracle.barrier = self.rng.random() < 0.5 if barrier is None else barrier
        self.server = ShardServer(self.clock, self.oracle)
        self.running: dict[str, set[int]] = {}
        spec = {"count": 8, "ending_s": 3.0, "prepare_s": PREPARE_S, "settle_s": 0.1, **spec}
        self.spec = ShardSpec(barrier=self.oracle.barrier, **spec)
        self.write_spec()

    def write_spec(self) -> None:
        """As `configure` does, without a session: people are not what is tested here."""
        key = shards_key("jobs", "spec")
        current = self.server.get(key)
        version = Versioned.decode(current).version if current else 0
        document = {"schema": 1, "version": version + 1, "id": f"{version}", "token": 0}
        value = encode_json({**document, **self.spec.encode()})
        assert self.server.put(key, value, current.version if current else None)

    def start(self) -> None:
        taken = {process.name for process in self.processes}
        free = [name for name in self.names if name not in taken]
        if free:
            self.started += 1
            name = self.rng.choice(free)
            # A process that crashed may still be ending its bodies; the new one is another process.
            self.running[name] = set()
            self.processes.append(Owner(self, name))

    def resize(self, _: Process) -> None:
        self.spec = self.spec.change(count=self.rng.choice([4, 8, 12]), pins={})
        self.write_spec()

    def reweigh(self, process: Process) -> None:
        self.spec = self.spec.change(weights={process.name: self.rng.choice([0, 1, 3])})
        self.write_spec()

    def pin(self, process: Process) -> None:
        self.spec = self.spec.change(pins={self.rng.randrange(4): process.name})
        self.write_spec()

    def depose(self, _: Process) -> None:
        """The record of the controller is removed by force."""
        record = self.server.get("elections/shards%2Fjobs/leader")
        if record is not None:
            self.server.delete(record.key, record.version)

    def break_or_mend(self, process: Process) -> None:
        assert isinstance(process, Owner)
        process.breaks = not process.breaks

    def slow_down(self, process: Process) -> None:
        assert isinstance(process, Owner)
        process.slow = not process.slow

    def ask_for_rest(self) -> None:
        """People undo what they have asked for, and have what failed tried again."""
        self.spec = self.spec.change(weights={}, pins={}, retry=self.spec.retry + 1)
        self.write_spec()

    def holders(self) -> dict[int, str]:
        entries = self.server.list(shards_key("jobs", "at"))
        return {int(each.key.split("/")[3]): Claim.decode(each.value).name for each in entries}

    def current(self) -> ShardPlan:
        if self.oracle.plan is None:
            return ShardPlan()
        return ShardPlan.decode(self.oracle.plan.body)

    def is_settled(self) -> bool:
        """Every shard is owned as planned, and no move is under way."""
        valid = {
            term.shard: term.name
            for term in self.oracle._valid
            if isinstance(term, ShardTerm) and is_valid(term)
        }
        plan = self.current()
        live = {each.name for each in self.processes if not each.task.done()}
        return (
            valid == self.holders() == dict(enumerate(plan.owners))
            and (plan.count, plan.retry) == (self.spec.count, self.spec.retry)
            and set(plan.members) == live
            and not plan.moves
            and not plan.unheld
        )


class SlowWorld(ShardWorld):
    """Two members that often prepare for too long, and whose bodies do not raise. Nothing is tried
    again by request, and one of them leaves, if possible the one that was not too slow."""

    happenings: ClassVar = {
        "join": 6,
        "leave": 1,
        "crash": 1,
        "cut": 1,
        "heal": 3,
        "reweigh": 3,
        "pin": 3,
        "slow_down": 3,
    }
    names = NAMES[:2]

    def __init__(self, seed: int, *, barrier: bool | None = None) -> None:
        super().__init__(seed, barrier=barrier, prepare_s=0.6)

    def ask_for_rest(self) -> None:
        self.spec = self.spec.change(weights={}, pins={})
        self.write_spec()
        self.processes = [each for each in self.processes if not each.task.done()]
        slow = {name for names in self.current().slow.values() for name in names}
        self.processes.sort(key=lambda each: each.name not in slow)
        for process in self.processes[1:]:
            self.leave(process)


class VandalWorld(ShardWorld):
    """Another program writes to the plan, and deletes the spec."""

    happenings: ClassVar = {**ShardWorld.happenings, "vandalise": 2, "forget": 1}

    def forget(self, _: Process) -> None:
        entry = self.server.get(shards_key("jobs", "spec"))
        if entry is not None:
            self.server.delete(entry.key, entry.version)

    def vandalise(self, _: Process) -> None:
        entry = self.server.get(PLAN)
        if entry is None:
            return
        self.oracle.vandalised()
        if self.rng.random() < 0.5:
            self.server.delete(PLAN, entry.version)
        else:
            WatchedServer.put(self.server, PLAN, b"vandalised", entry.version)


class LoneController(Owner):
    """The only process that may be the controller, or one of the others."""

    def prepare(self) -> None:
        super().prepare()
        self.controls = self.name == NAMES[0]
        if self.controls:
            self.weight = 0.0


class FarewellWorld(ShardWorld):
    """One member is the controller and owns nothing. At the end all others leave, after another
    program has overwritten the plan while they were claiming shards, and the controller has
    crashed."""

    def start(self) -> None:
        taken = {process.name for process in self.processes}
        name = next((name for name in self.names if name not in taken), None)
        if name is not None:
            self.running[name] = set()
            self.processes.append(LoneController(self, name))

    def ask_for_rest(self) -> None:
        super().ask_for_rest()
        while len(self.processes) < 3:
            self.start()

    async def end(self) -> None:
        struck = asyncio.Event()

        def strike() -> None:
            """As soon as a member has won a shard, and before it has read the plan again."""
            if not struck.is_set():
                struck.set()
                self.crash(next(each for each in self.processes if each.name == NAMES[0]))
                entry = self.server.get(PLAN)
                assert entry is not None
                self.oracle.vandalised()
                WatchedServer.put(self.server, PLAN, b"vandalised", entry.version)

        members = [each for each in self.processes if each.name != NAMES[0]]
        for process in members:
            process.faults.cut()
        await asyncio.sleep(2 * TTL_S)  # until their leases have expired
        self.oracle.on_record = partial(asyncio.get_running_loop().call_soon, strike)
        for process in members:
            process.faults.heal()
        await struck.wait()
        await asyncio.sleep(self.rng.uniform(0, TTL_S))
        for process in members:
            process.task.cancel()
        async with reached("all members have left", 5 * TTL_S):
            await asyncio.wait([process.task for process in members])
        if self.holders():
            raise NotReached("records are left")
        await super().end()
