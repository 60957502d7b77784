"""Whole nodes of the lab that serve etcd's API, in virtual time, with clients and an oracle.

`EtcdWorld` is a world of the lab whose nodes have the services of etcd's API as well. Its clients
call them on any node, as over a connection: when the process of a node is killed or paused, there
is no answer. They go to another node then, and resume their watches there.

`EtcdReference` executes the commands in the log with the oracle of etcd's keyspace. So the lab
compares every result on every node with it. Besides, `EtcdChecker` checks what the clients see:

- an acknowledged write is in the log at its revision, and nothing is carried out twice;
- a linearizable read shows the state at its revision, which is not before any revision that was
  acknowledged or read before it began;
- the events of a watch are those of the log, in order, each once, across nodes; a watch is
  cancelled only if what it wants has been compacted, and with that revision;
- a lease does not expire before its ttl has passed since the last confirmed renewal was sent, and
  nobody is told that a lease has ended that has not;
- a candidate that was told that it leads is the first in the line until it resigns or its lease
  ends, whatever becomes of calls that it has given up before;
- after all faults have ended, the watches catch up, and a candidate is elected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from doyen.lab import machines
from doyen.lab.machines import NodeMachine
from doyen.lab.plan import Plan, stream
from doyen.lab.quorum import Participants, QuorumWorld
from doyen.lab.quorum_checkers import QuorumRecoveryChecker
from doyen.lab.reference import ReferenceKeyspace, ReferenceLease
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import Code, EtcdError
from doyen.quorum.etcd_api.service import EtcdApi
from doyen.quorum.keyspace import commands
from doyen.quorum.keyspace.etcd_requests import EtcdRecord, EtcdRefusal
from doyen.quorum.keyspace.etcd_state import OVERHEAD, RequestRefused
from doyen.quorum.keyspace.versions import ETCD
from doyen.quorum.node.driver import Driver
from etcd_oracle import EtcdOracle, select

CLIENTS = 3
CANDIDATES = 3
ELECTION = b"k/e"
KEYS = [b"k/%d" % number for number in range(4)]
TTL = 3
ANSWER_S = 2.0
SILENT_S = 1.5
"""After so long without an event a client asks whether there are any, and goes to another node."""
POLL_S = 0.05
QUOTA_BYTES = 1 << 30
"""The oracle does not know that the history is bounded by the quota."""


class _Ids:
    cluster_id = "lab"
    ids: dict[str, str] = {}  # noqa: RUF012


class EtcdReference(ReferenceKeyspace):
    """Executes the commands of the etcd keyspace as well."""

    oracle: EtcdOracle
    world: EtcdWorld

    @classmethod
    def extend(cls, keyspace: ReferenceKeyspace, world: EtcdWorld) -> EtcdReference:
        keyspace.__class__ = cls
        assert isinstance(keyspace, EtcdReference)
        keyspace.oracle = EtcdOracle()
        keyspace.world = world
        keyspace.ids = {}
        keyspace.ended_ids = {}
        keyspace._commands |= {
            commands.EtcdApply: lambda each: keyspace._etcd(
                lambda: keyspace.oracle.apply(each.request)
            ),
            commands.EtcdGrant: lambda each: keyspace._etcd(lambda: keyspace._begin_lease(each)),
            commands.EtcdRevoke: lambda each: keyspace._etcd(
                lambda: keyspace._end_lease(each.lease)
            ),
            commands.EtcdCompact: lambda each: keyspace._etcd(
                lambda: keyspace.oracle.compact(each.revision)
            ),
        }
        return keyspace

    ids: dict[int, int]
    """For each lease that has not ended, its number by its id of etcd."""
    ended_ids: dict[int, ReferenceLease]

    def _etcd(self, change: Callable[[], Any]) -> commands.Result:
        if self.version < ETCD:
            return commands.MalformedCommand("the cluster's version has no etcd keyspace")
        try:
            result = change()
        except RequestRefused as refused:
            return commands.EtcdRefused(refused.refusal)
        return commands.EtcdDone(self.oracle.revision, result)

    def _begin_lease(self, command: commands.EtcdGrant) -> None:
        self.oracle.grant(command.lease)
        self.revision += 1
        self.unended[self.revision] = {}
        self.leases[self.revision] = ReferenceLease(self.index, self.now, command.ttl_s)
        self.ids[command.lease] = self.revision

    def _end_lease(self, lease: int) -> None:
        if lease not in self.ids:
            raise RequestRefused(EtcdRefusal.LEASE_NOT_FOUND)
        self._end((self.ids[lease],), expired=False)

    def _end(self, leases: Any, *, expired: bool) -> None:
        ending = [lease for lease, number in self.ids.items() if number in leases]
        super()._end(leases, expired=expired)
        for number in leases:
            for lease in ending:
                if self.ids.get(lease) == number:
                    del self.ids[lease]
                    self.ended_ids[lease] = self.leases[number]
                    self.oracle.end(lease)
                    self.world.etcd.check_lease(lease)

    def bytes(self) -> int:
        oracle, floor = self.oracle, self.oracle.compacted - 1
        last: dict[bytes, EtcdRecord] = {}
        kept = []
        for record, _ in oracle.events:
            if record.mod > floor:
                kept.append(record)
            else:
                last[record.key] = record
        kept += [record for record in last.values() if record.version]
        return super().bytes() + sum(len(r.key) + len(r.value) + OVERHEAD for r in kept)


class EtcdNode(NodeMachine):
    """A node with etcd's services."""

    api: EtcdApi | None = None

    async def _propose(self, driver: Driver) -> None:
        election_s = self._settings.election_timeout_s
        self.api = EtcdApi(driver, self.keyspace, _Ids(), election_s=election_s)  # type: ignore[arg-type]
        await super()._propose(driver)

    def stopped(self) -> None:
        self.api = None
        super().stopped()


class EtcdParticipants(Participants):
    """The nodes have etcd's services."""

    def create(self) -> None:
        super().create()
        for number, name in enumerate(self._world.plan.names, 1):
            self.machines[name] = EtcdNode(self._world, name, number, joining=False)


class NoAnswer(Exception):
    """It is not known whether a request was carried out."""


class EtcdChecker:
    """Compares what clients see with the log."""

    def __init__(self, world: EtcdWorld, reference: EtcdReference) -> None:
        self._world = world
        self._reference = reference
        self.oracle = reference.oracle
        self.renewed: dict[int, float] = {}
        """When the last confirmed renewal of a lease was sent."""
        self.floor = 1
        """The latest revision that was acknowledged or read."""
        self.answers = self.told = self.cancelled = 0
        self.resumed = 0
        self.elected = 0
        self.elected_at = -inf

    def fail(self, text: str) -> None:
        self._world.fail("etcd", text)

    def check_revision(self, revision: int, floor: int, what: str) -> bool:
        if not floor <= revision <= self.oracle.revision:
            self.fail(
                f"{what} at revision {revision}, after {floor} and before {self.oracle.revision}"
            )
            return False
        self.floor = max(self.floor, revision)
        self.answers += 1
        return True

    def written(self, key: bytes, value: bytes, revision: int, floor: int) -> None:
        if self.check_revision(revision, floor + 1, f"{value!r} was written"):
            found = self.oracle.states[revision].get(key)
            if found is None or (found.value, found.mod) != (value, revision):
                self.fail(f"{value!r} was acknowledged at revision {revision}, which has {found}")

    def read(self, key: bytes, end: bytes, response: Any, floor: int) -> None:
        revision = response.header.revision
        if self.check_revision(revision, floor, "a read"):
            expected = select(self.oracle.states[revision], key, end)
            if [*map(_record, response.kvs)] != expected:
                self.fail(f"a read at revision {revision} differs from the log")

    def check_lease(self, lease: int) -> None:
        """A lease has ended, or a renewal was confirmed."""
        ended = self._reference.ended_ids.get(lease)
        if ended is None or not ended.expired or lease not in self.renewed:
            return
        early_s = self.renewed[lease] + ended.ttl_s - ended.ended
        if early_s > 1e-6:
            self.fail(f"lease {lease} has expired {early_s:.3f} s too early")

    def kept(self, lease: int, ttl: int, sent: float) -> None:
        if ttl:
            self.renewed[lease] = max(sent, self.renewed.get(lease, -inf))
            self.check_lease(lease)
        elif lease in self._reference.ids:
            self.fail(f"a client was told that lease {lease} has ended, but it has not")

    def leads(self, lease: int, leader: Any) -> None:
        """A candidate was told that it leads, and has not resigned."""
        line = {
            key: record.create
            for key, record in self.oracle.now.items()
            if key.startswith(ELECTION + b"/")
        }
        if lease in self._reference.ids and (
            line.get(leader.key) != leader.rev or min(line.values()) != leader.rev
        ):
            self.fail(f"{leader.key!r} of revision {leader.rev} does not lead: {line}")
        self.elected_at = self._world.loop.time()

    def check_once(self) -> None:
        """Every value is written once, since each request has another. Candidates put theirs again
        when they are elected."""
        values = [
            record.value
            for record, _ in self.oracle.events
            if record.version and not record.key.startswith(ELECTION)
        ]
        if len(values) != len({*values}):
            self.fail("a write was carried out twice")


def _record(kv: Any) -> EtcdRecord:
    return EtcdRecord(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


class EtcdUser:
    """A client: one request after the other, a lease that it keeps, and a watch."""

    def __init__(self, world: EtcdWorld, number: int) -> None:
        self._world = world
        self._number = number
        self._rng = stream(world.noise, f"etcd {number}")
        self._lease = 0
        self._writes = self._leases = 0
        self.position = 0
        """How many events of the log the watch has told of, or skipped."""

    @property
    def _checker(self) -> EtcdChecker:
        return self._world.etcd

    def _node(self) -> EtcdNode:
        """Any node that serves."""
        serving = [each for each in self._world.nodes() if each.up and each.api is not None]
        if not serving:
            raise NoAnswer
        return self._rng.choice(serving)

    def _start(self, ask: Callable[[EtcdApi], Awaitable[Any]]) -> asyncio.Task[Any]:
        node = self._node()
        assert node.process is not None
        api = node.api
        assert api is not None

        async def work() -> Any:
            return await ask(api)

        return node.process.start(work())

    async def _call(self, ask: Callable[[EtcdApi], Awaitable[Any]]) -> Any:
        task = self._start(ask)
        await asyncio.wait({task}, timeout=ANSWER_S)
        if not task.done():
            raise NoAnswer
        return self._result(task)

    def _result(self, task: asyncio.Task[Any]) -> Any:
        try:
            return task.result()
        except EtcdError as error:
            if error.code is Code.UNAVAILABLE:
                raise NoAnswer from error
            raise
        except asyncio.CancelledError:
            raise NoAnswer from None

    async def work(self) -> None:
        acts = [self._put, self._put, self._read, self._read, self._txn, self._delete, self._keep]
        acts += [*acts, self._compact]
        while True:
            await asyncio.sleep(self._rng.expovariate(15))
            try:
                await self._rng.choice(acts)()
            except NoAnswer:
                await asyncio.sleep(0.1)

    def _value(self) -> bytes:
        self._writes += 1
        return b"%d/%d" % (self._number, self._writes)

    async def _put(self) -> None:
        key, value, floor = self._rng.choice(KEYS), self._value(), self._checker.floor
        lease = self._lease if self._rng.random() < 0.4 else 0
        request = rpc.PUT.request(key=key, value=value, lease=lease)
        try:
            done = await self._call(lambda api: api.unary[rpc.PUT](request))
        except EtcdError as error:
            self._gone(lease, error)
        else:
            self._checker.written(key, value, done.header.revision, floor)

    def _gone(self, lease: int, error: EtcdError) -> None:
        """A request was refused because its lease has ended."""
        assert error.code is Code.NOT_FOUND, error
        self._checker.kept(lease, 0, 0.0)
        self._lease = 0

    async def _read(self) -> None:
        key, end = self._rng.choice([*((key, b"") for key in KEYS), (b"k/", b"k0")])
        request = rpc.RANGE.request(key=key, range_end=end)
        floor = self._checker.floor
        found = await self._call(lambda api: api.unary[rpc.RANGE](request))
        self._checker.read(key, end, found, floor)

    async def _txn(self) -> None:
        """Replace the latest value that this client knows."""
        key, value, floor = self._rng.choice(KEYS), self._value(), self._checker.floor
        had = self._checker.oracle.now.get(key)
        mod = had.mod if had else 0
        request = rpc.TXN.request(
            compare=[{"key": key, "target": "MOD", "mod_revision": mod}],
            success=[{"request_put": {"key": key, "value": value}}],
            failure=[{"request_range": {"key": key}}],
        )
        done = await self._call(lambda api: api.unary[rpc.TXN](request))
        if done.succeeded:
            self._checker.written(key, value, done.header.revision, floor)
        else:
            self._checker.check_revision(done.header.revision, floor, "a transaction")

    async def _delete(self) -> None:
        request = rpc.DELETE_RANGE.request(key=self._rng.choice(KEYS), prev_kv=True)
        floor = self._checker.floor
        done = await self._call(lambda api: api.unary[rpc.DELETE_RANGE](request))
        self._checker.check_revision(done.header.revision, floor, "a deletion")

    async def _compact(self) -> None:
        revision = max(1, self._checker.floor - self._rng.choice([0, 3, 20]))
        request = rpc.COMPACT.request(revision=revision)
        try:
            await self._call(lambda api: api.unary[rpc.COMPACT](request))
        except EtcdError as error:
            if error.code is not Code.OUT_OF_RANGE:
                raise

    async def _keep(self) -> None:
        sent = self._world.loop.time()
        if not self._lease:
            self._leases += 1
            lease = 1000 * self._number + self._leases
            request = rpc.GRANT.request(TTL=TTL, ID=lease)
            await self._call(lambda api: api.unary[rpc.GRANT](request))
            self._lease = lease
            self._checker.kept(lease, TTL, sent)
            return
        lease = self._lease
        if self._rng.random() < 0.1:
            revoke = rpc.REVOKE.request(ID=lease)
            self._lease = 0
            try:
                await self._call(lambda api: api.unary[rpc.REVOKE](revoke))
            except EtcdError as error:
                self._gone(lease, error)
            return
        await self._renew(lease)

    async def _renew(self, lease: int) -> None:
        sent = self._world.loop.time()
        ttl = await self._call(lambda api: api.leases.renew(lease))
        self._checker.kept(lease, ttl, sent)
        if not ttl and lease == self._lease:
            self._lease = 0

    async def watch(self) -> None:
        """Watch all keys from the first revision on, at one node after the other."""
        while True:
            try:
                node = self._node()
            except NoAnswer:
                await asyncio.sleep(POLL_S)
                continue
            responses: list[Any] = []
            assert node.process is not None
            assert node.api is not None
            task = node.process.start(self._stream(node.api, responses))
            self._checker.resumed += 1
            heard = self._world.loop.time()
            while not task.done() and self._world.loop.time() - heard < SILENT_S:
                await asyncio.sleep(POLL_S)
                if responses:
                    heard = self._world.loop.time()
                for response in responses:
                    self._take(response)
                    if response.canceled:
                        heard = -inf
                responses.clear()
            task.cancel()

    async def _stream(self, api: EtcdApi, responses: list[Any]) -> None:
        events = self._checker.oracle.events
        # The revision after the last event, of which all events have been told.
        start = events[self.position - 1][0].mod + 1 if self.position else 1
        if self._skipped > start:
            start = self._skipped
        create = {"key": b"k/", "range_end": b"k0", "start_revision": start, "prev_kv": True}

        async def requests() -> AsyncIterator[Any]:
            yield rpc.WATCH.request(create_request=create)
            await asyncio.Event().wait()

        try:
            async for response in api.streaming[rpc.WATCH](requests()):
                responses.append(response)  # noqa: PERF401 - another task reads them meanwhile
        except EtcdError:
            pass

    _skipped = 0
    """The compacted revision with which the watch was cancelled last."""

    def _take(self, response: Any) -> None:
        checker, oracle = self._checker, self._checker.oracle
        for event in response.events:
            checker.told += 1
            if self.position >= len(oracle.events):
                checker.fail("a watch told of an event that is not in the log")
                return
            record, _ = oracle.events[self.position]
            self.position += 1
            if (_record(event.kv), event.type) != (record, 0 if record.version else 1):
                checker.fail(f"a watch told of {event.kv} instead of {record}")
                return
        if response.canceled:
            wanted = oracle.events[self.position : self.position + 1]
            compacted = response.compact_revision
            if not compacted or compacted > oracle.compacted:
                checker.fail(f"a watch was cancelled with revision {compacted}")
            checker.cancelled += 1
            self._skipped = compacted
            while wanted and wanted[0][0].mod < compacted:
                self.position += 1
                wanted = oracle.events[self.position : self.position + 1]


class EtcdCandidate(EtcdUser):
    """A client that stands in an election, leads for a while and resigns. When it is not answered,
    it goes on at another node, or no longer wants to lead. The node that it has left notices that
    later."""

    async def work(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(5))
            try:
                if self._lease:
                    await self._stand(self._lease)
                else:
                    await self._keep()
            except NoAnswer:
                pass
            except EtcdError as error:
                if error.code is not Code.NOT_FOUND:
                    raise

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(TTL / 4)
            if self._lease:
                with suppress(NoAnswer):
                    await self._renew(self._lease)

    async def _stand(self, lease: int) -> None:
        while self._lease == lease:
            request = rpc.CAMPAIGN.request(name=ELECTION, lease=lease, value=self._value())
            call = self._start(partial(_campaign, request))
            await asyncio.wait({call}, timeout=self._rng.expovariate(1))
            if call.done():
                await self._lead(lease, self._result(call).leader)
                return
            self._world.loop.call_later(self._rng.expovariate(2), call.cancel)
            if self._rng.random() < 0.3:
                return

    async def _lead(self, lease: int, leader: Any) -> None:
        self._checker.elected += 1
        self._checker.leads(lease, leader)
        await asyncio.sleep(self._rng.expovariate(3))
        self._checker.leads(lease, leader)
        resign = rpc.RESIGN.request(leader=leader)
        while True:
            with suppress(NoAnswer):
                await self._call(lambda api: api.unary[rpc.RESIGN](resign))
                return
            await asyncio.sleep(POLL_S)


async def _campaign(request: Any, api: EtcdApi) -> Any:
    return await api.unary[rpc.CAMPAIGN](request)


class EtcdRecovery(QuorumRecoveryChecker):
    """The watches have to catch up as well, and the election has to go on."""

    def missing(self) -> str | None:
        world = self._world
        assert isinstance(world, EtcdWorld)
        found = super().missing()
        if found is None and any(
            user.position < len(world.etcd.oracle.events) - 10 for user in world.users
        ):
            return "a watch has not been told of what happened"
        if found is None and world.etcd.elected_at <= world.measurements.healed_at:
            return "no candidate of etcd's API was elected"
        return found


class EtcdWorld(QuorumWorld):
    """A world with etcd's services and clients of them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.participants = EtcdParticipants(self)
        self.recovery = EtcdRecovery(self)
        reference = EtcdReference.extend(self.log.reference.keyspace, self)
        self.etcd = EtcdChecker(self, reference)
        self.users = [EtcdUser(self, number) for number in range(1, CLIENTS + 1)]
        self.candidates = [
            EtcdCandidate(self, CLIENTS + number) for number in range(1, CANDIDATES + 1)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def nodes(self) -> list[EtcdNode]:
        return [each for each in self.participants.nodes() if isinstance(each, EtcdNode)]

    def run(self) -> Any:
        before, machines.QUOTA_BYTES = machines.QUOTA_BYTES, QUOTA_BYTES
        try:
            return super().run()
        finally:
            machines.QUOTA_BYTES = before

    async def _run_faults(self) -> None:
        for user in self.users:
            self._tasks += [self.create_task(user.work()), self.create_task(user.watch())]
        for each in self.candidates:
            self._tasks += [self.create_task(each.work()), self.create_task(each.keep())]
        await super()._run_faults()

    def _check_end(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.fail("defect", repr(task.exception()))
        self.etcd.check_once()
        super()._check_end()

    async def _clean_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super()._clean_up()
