"""Clients of the keyspace, and what must hold of all that they see.

A `ClientHost` is a process with a store on `doyen://`. It keeps leases, watches many scopes, and
creates, puts, deletes, queues and reads. `Witness` holds what it is told against the log, by way of
the `Reference`:

- **Writes.** What was acknowledged is in the log as it was asked for, at a place that lies after
  everything that was acknowledged before it was asked; what was refused is not there; nothing is
  there twice.
- **Reads.** Each shows the state after some entry that had been committed when the answer came, and
  none from before what anybody had seen or been told when the read began.
- **Leases.** None ends by its time before its ttl has passed since the last renewal that was
  confirmed was sent, in true time; nobody is told that a lease has ended which stands. While one
  node leads and commits, each ends within twice its ttl and `LATE_S` of the last renewal that
  arrived at a leader; and once all is healed, those of processes that are gone end.
- **Watches.** Whoever reads over a connection is told, with the answer at the latest, of every
  change of what it watches there.
- **Roles.** A client's secret makes nobody a peer or an administrator.

Imports the store, the session's runtime and the lab's machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from doyen.errors import DoyenError, LeaseGone, StoreError, StoreUnavailable, TicketGone
from doyen.lab.machines import Process
from doyen.lab.processes import CLIENT_SECRET, SimulatedMachine
from doyen.lab.reference import Reference
from doyen.model import Entry, Lease
from doyen.quorum.keyspace.commands import StoredEntry
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.protocol.connection import dial
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import Security
from doyen.stores.port import Context, Store, open_store

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

__all__ = ["ClientHost", "Witness"]

TTL_S = 1.0
GROUPS, KEYS = 5, 3
LEASES = 2
WATCHES = 12
CALL_S = 2.0
"""How long a client waits for an answer."""
NOTICE_S = 0.5
"""How long before a read a change must have been committed for the read to prove anything."""
LATE_S = 2.0
"""How much later than twice its ttl a lease may end: what a leader that has begun to lead, or that
was stopped, takes for it."""
SILENT_S = 2 * TTL_S + 6.0
"""How long a lease may outlive its process once all is healed: twice its ttl and two elections."""
PAUSE_S = 0.15
LARGE = 1100
"""Bytes of a value, or of a ticket's key, whose answer nodes of the first version did not keep."""
LONG = "l/" + "1" * LARGE
LINES = ("l/0", LONG)

T = TypeVar("T")


class RequestStart(NamedTuple):
    """What was known when something was asked."""

    at: float
    low: int
    """The last index that anybody had seen or been told of."""


class Eye:
    """A watch, as its client sees it."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.begun_at = inf
        self.told_at = -inf


class Held:
    """A lease, as its owner sees it."""

    def __init__(self, process: Process, sent: float) -> None:
        self.process = process
        self.sent = sent
        """When the last renewal was sent that was confirmed."""
        self.given_up = inf


class Witness:
    """What clients of the keyspace were told, held against the log."""

    def __init__(self, world: QuorumWorld, reference: Reference) -> None:
        self._world = world
        self._log = reference
        self._low = 0
        self._held: dict[int, Held] = {}
        self._refused: dict[bytes, None] = {}
        self._heard: dict[int, float] = {}
        """When a renewal of each lease last arrived at a node that led, or had."""
        self.eyes: dict[Process, list[Eye]] = {}
        self.answers = 0

    def begin(self) -> RequestStart:
        return RequestStart(self._world.loop.time(), self._low)

    def _complain(self, kind: str, text: str) -> None:
        self._world.complain(kind, text)

    def _answered(self, index: int) -> None:
        self._low = max(self._low, index)
        self.answers += 1
        self._world.answered()

    # Reads and writes.

    def read(
        self, begun: RequestStart, scopes: Sequence[str], holds: Callable[[int], bool]
    ) -> None:
        """A read was answered: what it shows `holds` after some entry."""
        for index in self._log.points(scopes, begun.low, self._log.index):
            if holds(index):
                self._answered(index)
                return
        self._complain(
            "read",
            f"what was read at {', '.join(scopes)} never stood there between entries {begun.low}"
            f" and {self._log.index}",
        )

    def wrote(self, begun: RequestStart, entry: Entry) -> None:
        """A write was acknowledged."""
        written = self._log.written.get(_number(entry.version))
        if written is None or not _same(entry, written.record):
            self._complain("lost write", f"{entry.key} was acknowledged, and is not in the log")
        elif written.place < begun.low:
            self._complain("order", f"{entry.key} was written before it was asked for")
        else:
            self._answered(written.place)

    def deleted(self, begun: RequestStart, key: str, version: int) -> None:
        index = self._log.deleted.get(version)
        if index is None:
            self._complain("lost write", f"a delete of {key} was acknowledged, and is nowhere")
        else:
            self._answered(index)

    def refused(self, value: bytes) -> None:
        """It is certain, the client was told, that this was not written."""
        self._refused[value] = None

    # Leases.

    def granted(self, lease: Lease, process: Process, sent: float) -> None:
        known = self._log.leases.get(int(lease.id))
        if known is None or known.ttl_s != lease.ttl_s:
            self._complain("lost write", f"lease {lease.id} was granted, and is not in the log")
            return
        self._held[int(lease.id)] = Held(process, sent)
        self._answered(known.index)
        self.advanced()

    def renewed(self, lease: Lease, sent: float) -> None:
        held = self._held[int(lease.id)]
        held.sent = sent
        self._world.answered()
        self.advanced()

    def heard(self, leases: list[int]) -> None:
        """Renewals have arrived at a leader."""
        self._heard |= dict.fromkeys(leases, self._world.loop.time())

    def check_ends(self, steady_since: float) -> None:
        """One node has led and committed since then."""
        now = self._world.loop.time()
        for number in self._log.standing:
            lease = self._log.leases[number]
            since = max(steady_since, lease.began, self._heard.get(number, 0.0))
            if (late_s := now - since - lease.ttl_s) > lease.ttl_s + LATE_S:
                self._complain("lease", f"lease {number} stands {late_s:.3f} s after its time")

    def given_up(self, lease: Lease) -> None:
        """Its owner revokes it, and may not learn whether that was done."""
        self._held[int(lease.id)].given_up = self._world.loop.time()

    def revoked(self, lease: Lease) -> None:
        """The owner is told that it was ended: nobody sees anything of it from now on."""
        known = self._log.leases[int(lease.id)]
        if known.ended == inf:
            self._complain("lost write", f"lease {lease.id} was revoked, and stands")
        else:
            self._answered(known.end_index)

    def gone(self, lease: Lease) -> None:
        """The owner is told that it has ended."""
        if self._log.leases[int(lease.id)].ended == inf:
            self._complain("lease", f"lease {lease.id} is said to have ended, and stands")

    def advanced(self) -> None:
        """More is committed, or confirmed."""
        for number, held in list(self._held.items()):
            lease = self._log.leases[number]
            if lease.ended == inf:
                continue
            early = held.sent + lease.ttl_s - lease.ended
            if lease.expired and early > 1e-6:
                self._complain(
                    "lease",
                    f"lease {number} was ended {early:.3f} s before its ttl had passed since a"
                    " confirmed renewal",
                )
            if held.process.dead or self._world.loop.time() > lease.ended + 60:
                del self._held[number]

    def overdue(self, since: float) -> str | None:
        """A lease that stands though its process is gone; everything is healed since then."""
        now = self._world.loop.time()
        for number in self._log.standing:
            lease, held = self._log.leases[number], self._held.get(number)
            if lease.ttl_s != TTL_S or (held and not held.process.dead and held.given_up == inf):
                continue
            if now - max(since, lease.began) > SILENT_S:
                self._complain("lease", f"lease {number} stands, and its process is long gone")
            return f"lease {number} stands, and its process is gone"
        return None

    # Watches.

    def served(self, process: Process, begun: RequestStart) -> None:
        """A read of this process was answered, over the connection that its watches are on. What
        the node had to tell came with the answer, or before."""
        self._world.loop.call_soon(self._check_eyes, process, begun, context=process.context)

    def _check_eyes(self, process: Process, begun: RequestStart) -> None:
        for eye in self.eyes.get(process, ()):
            changed = self._log.last_change(eye.scope, begun.at - NOTICE_S)
            if changed > eye.begun_at and eye.told_at < changed:
                self._complain(
                    "watch",
                    f"{process.machine} watches {eye.scope}, which changed at {changed:.3f} s, and"
                    " has been told nothing since",
                )

    def untold(self) -> str | None:
        """A watch that has not been told."""
        now = self._world.loop.time()
        for process, eyes in self.eyes.items():
            if process.dead:
                continue
            for eye in eyes:
                changed = self._log.last_change(eye.scope, now - NOTICE_S)
                if changed > eye.begun_at and eye.told_at < changed:
                    return f"{process.machine} was not told of a change of {eye.scope}"
        return None

    # The end.

    def judge(self) -> None:
        for value, times in self._log.values.items():
            if times > 1 and value.startswith(b"op"):
                self._complain("twice", f"{value[:12]!r} was written {times} times")
            if value in self._refused:
                self._complain("refused", f"{value[:12]!r} was refused, and yet written")

    def compare(self, name: str, keyspace: Keyspace) -> None:
        """What a node has that is up to date."""
        log = self._log
        mine = (
            *(log.revision, log.era, log.version, sorted(log.standing)),
            *(log.quota, log.bytes()),
        )
        theirs = (
            keyspace.revision,
            keyspace.era,
            keyspace.version,
            [lease for lease, _ in keyspace.leases()],
            keyspace.quota,
            keyspace.bytes,
        )
        same = all(
            [*keyspace.list(prefix)] == log.under(prefix, log.index)
            for prefix in ("k", "l", "elections")
        )
        if mine != theirs or not same:
            self._complain("state", f"{name} has another state than its log says")


def _number(version: object) -> int:
    return version if isinstance(version, int) else -1


def _same(entry: Entry | None, record: StoredEntry | None) -> bool:
    if entry is None or record is None:
        return entry is None and record is None
    lease = str(record.lease) if record.lease else None
    return (entry.key, entry.value, entry.revision, entry.version, entry.lease) == (
        record.key,
        record.value,
        record.revision,
        record.version,
        lease,
    )


class ClientHost(SimulatedMachine):
    """A client of the keyspace: leases, watches, writes and reads, for as long as it lives."""

    async def live(self) -> None:
        world = self.world
        nodes = ",".join(f"{name}:1" for name in world.plan.names)
        url = f"doyen://{CLIENT_SECRET}@{nodes}"
        assert self.process is not None
        self._witness = world.witness
        self._me = self.process
        self._witness.eyes[self._me] = []
        self._versions: dict[str, int] = {}
        self._tickets: list[Entry] = []
        self._leases: list[Lease] = []
        if self.rng.random() < 0.3:
            await self._overreach(url)
        store: Store | None = None
        while store is None:
            try:
                store = await open_store(url, Context(self.clock, lambda _: None))
            except StoreError:
                await asyncio.sleep(0.2)
        for _ in range(LEASES):
            self._me.start(self._keep(store))
        for _ in range(WATCHES):
            group = f"k/{self.rng.randrange(GROUPS)}"
            scope = group if self.rng.random() < 0.3 else f"{group}/{self.rng.randrange(KEYS)}"
            self._me.start(self._watch(store, scope))
        for line in LINES:
            self._me.start(self._watch(store, line))
        await self._work(store)

    async def _overreach(self, url: str) -> None:
        """Try to be what a client's secret does not make it."""
        node = self.rng.choice(self.world.plan.names)
        try:
            link = await dial(
                f"{node}:1",
                ConnectionIdentity("lab", "n1" if node != "n1" else "n2", 1),
                role="peer",
                wanted=node,
                security=Security(peer_secret=CLIENT_SECRET.encode()),
                on_frames=lambda link, frames: None,
                on_end=lambda link, end: None,
            )
        except DoyenError:
            pass
        else:
            link.abort()
            self.world.complain("role", f"{node} has let a client's secret in as a peer's")
        try:
            store = await open_store(
                f"{url}?token_floor=1000000", Context(self.clock, lambda _: None)
            )
        except StoreError:
            return
        await store.close()
        self.world.complain("role", "a client's secret was enough to lift tokens")

    async def _ask(self, call: Awaitable[T], value: bytes | None = None) -> T | None:
        """The answer; None if there was none."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except StoreUnavailable:
            if value is not None:
                self._witness.refused(value)
        except (StoreError, TimeoutError):
            pass
        return None

    # Leases.

    async def _keep(self, store: Store) -> None:
        loop, rng, witness = self.world.loop, self.rng, self._witness
        while True:
            sent = loop.time()
            lease = await self._ask(store.grant(TTL_S))
            if lease is None:
                await asyncio.sleep(0.2)
                continue
            witness.granted(lease, self._me, sent)
            self._leases.append(lease)
            while rng.random() > 0.1:
                await asyncio.sleep(TTL_S / 3 * rng.uniform(0.7, 1.1))
                sent = loop.time()
                try:
                    async with asyncio.timeout(TTL_S / 2):
                        await store.renew(lease)
                except LeaseGone:
                    witness.gone(lease)
                    break
                except (StoreError, TimeoutError):
                    continue
                witness.renewed(lease, sent)
            self._leases.remove(lease)
            witness.given_up(lease)
            if await self._ask(self._boxed(store.revoke(lease))) is not None:
                witness.revoked(lease)
                await self._list(store, "k")

    # Watches.

    async def _watch(self, store: Store, scope: str) -> None:
        eye = Eye(scope)
        told = asyncio.Event()

        def notify() -> None:
            eye.told_at = self.world.loop.time()
            told.set()

        while True:
            try:
                await store.watch(scope, notify)
            except StoreError:
                await asyncio.sleep(0.2)
            else:
                break
        eye.begun_at = self.world.loop.time()
        self._witness.eyes[self._me].append(eye)
        while True:
            told.clear()
            await self._list(store, scope)
            await told.wait()

    # Reads and writes.

    async def _work(self, store: Store) -> None:
        rng = self.rng
        doing: list[Callable[[Store, str], Awaitable[None]]] = [
            *(self._create, self._create, self._create, self._put, self._delete),
            *(self._enqueue, self._enqueue, self._get, self._ahead),
        ]
        while True:
            await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
            # Once all is healed, what was written goes, so that there is room within the quota.
            do = rng.choice((self._get, self._delete) if self.world.healed else doing)
            await do(store, f"k/{rng.randrange(GROUPS)}/{rng.randrange(KEYS)}")

    def _value(self) -> bytes:
        number = self.world.next_number()
        return b"op%d" % number + (b"." * LARGE if self.rng.random() < 0.7 else b"")

    async def _create(self, store: Store, key: str) -> None:
        if not self._leases:
            return
        begun, value, lease = self._witness.begin(), self._value(), self.rng.choice(self._leases)
        made = await self._ask_leased(store.create(key, value, lease), lease, value)
        if made is None:
            return
        if made.won:
            self._witness.wrote(begun, made.entry)
        else:
            self._shown(begun, key, made.entry)
        self._versions[key] = _number(made.entry.version)

    async def _ask_leased(self, call: Awaitable[T], lease: Lease, value: bytes) -> T | None:
        async def called() -> T:
            try:
                return await call
            except LeaseGone:
                self._witness.gone(lease)
                raise

        return await self._ask(called(), value)

    async def _put(self, store: Store, key: str) -> None:
        begun, value = self._witness.begin(), self._value()
        version = self._versions.get(key)
        entry = await self._ask(self._boxed(store.put(key, value, if_version=version)), value)
        if entry is None:
            return
        if entry[0] is not None:
            self._witness.wrote(begun, entry[0])
            self._versions[key] = _number(entry[0].version)
        else:
            self._differed(begun, key, version)

    async def _delete(self, store: Store, key: str) -> None:
        version = self._versions.pop(key, None)
        if version is None:
            return
        begun = self._witness.begin()
        done = await self._ask(store.delete(key, if_version=version))
        if done:
            self._witness.deleted(begun, key, version)
        elif done is False:
            self._differed(begun, key, version)

    async def _enqueue(self, store: Store, key: str) -> None:
        if not self._leases:
            return
        begun, value = self._witness.begin(), b"op%d" % self.world.next_number()
        line, lease = self.rng.choice(("l/0", LONG, LONG)), self.rng.choice(self._leases)
        rank = self.rng.choice((0, 0, 1))
        ticket = await self._ask_leased(store.enqueue(line, value, lease, rank=rank), lease, value)
        if ticket is not None:
            self._witness.wrote(begun, ticket)
            self._tickets = [*self._tickets[-4:], ticket]

    async def _get(self, store: Store, key: str) -> None:
        begun = self._witness.begin()
        found = await self._ask(self._boxed(store.get(key)))
        if found is not None:
            self._shown(begun, key, found[0])
            self._witness.served(self._me, begun)
            if found[0] is not None:
                self._versions[key] = _number(found[0].version)
            else:
                self._versions.pop(key, None)

    async def _list(self, store: Store, scope: str) -> None:
        if scope.count("/") == 2:
            await self._get(store, scope)
            return
        begun = self._witness.begin()
        found = await self._ask(store.list(scope))
        if found is not None:
            log = self.world.reference

            def holds(index: int) -> bool:
                there = log.under(scope, index)
                return len(there) == len(found) and all(map(_same, found, there))

            self._witness.read(begun, [scope], holds)
            self._witness.served(self._me, begun)

    async def _ahead(self, store: Store, key: str) -> None:
        """Of a ticket of ours, or of the line."""
        if not self._tickets:
            return
        begun, log, ticket = self._witness.begin(), self.world.reference, self._tickets[-1]
        found: list[Entry | None]
        try:
            async with asyncio.timeout(CALL_S):
                found = [await store.ahead(ticket)]
        except TicketGone:
            self._tickets.pop()
            self._witness.read(begun, [ticket.key], lambda index: log.at(ticket.key, index) is None)
            return
        except (StoreError, TimeoutError):
            return

        name = ticket.key.rpartition("/")[0]

        def holds(index: int) -> bool:
            line = [each for each in log.under(name, index) if each.ticket]
            before = [each for each in line if each.key < ticket.key]
            return len(before) < len(line) and _same(found[0], before[-1] if before else None)

        self._witness.read(begun, [name], holds)
        self._witness.served(self._me, begun)

    async def _boxed(self, call: Awaitable[T]) -> list[T]:
        """An answer that may be None, told from none."""
        return [await call]

    def _shown(self, begun: RequestStart, key: str, entry: Entry | None) -> None:
        log = self.world.reference
        self._witness.read(begun, [key], lambda index: _same(entry, log.at(key, index)))

    def _differed(self, begun: RequestStart, key: str, version: int | None) -> None:
        """Something else stood there."""

        def holds(index: int) -> bool:
            there = self.world.reference.at(key, index)
            return (there.version if there is not None else None) != version

        self._witness.read(begun, [key], holds)
