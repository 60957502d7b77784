"""One election of candidates of doyen and of other programs on servers of etcd's API: real
processes that stand in it, others that observe it, and an oracle that compares what they claim with
the keys.

- At every sample, a term of doyen that was valid before the read and is valid after it must be the
  first of the line that was read.
- A candidate of another program that claims to lead, and still has its key, must be the first, and
  nobody else may be it. So no two can lead by their keys.
- The first of the line has a greater creation revision than each one before it.
- In the history of all changes, every claimed term was once the first of the line.

Samples are linearizable and go to the servers directly, past the faults of the network.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import grpc

import doyen
from doyen.quorum.etcd_api import rpc
from etcd_door import POLL_S, AnyNode, Door
from foreign import go_candidate
from servers import Proxy
from servers.environments import environment
from servers.etcd import ETCDCTL
from servers.fetch import obtain
from servers.process import HOST

TTL_S = 5
PATIENCE_S = 120.0
PINGS = "--keepalive-time=2s", "--keepalive-timeout=2s"
"""etcdctl goes to another server if one does not answer for so long."""
ETCD3_NEEDS = "etcd3==0.12.0", "protobuf==3.20.3", "setuptools<81"

ETCD3 = '''
"""A candidate, or an observer, with python-etcd3, which has a client for one server only: this
program goes to the next one when it fails."""

import os, sys, threading, time
import etcd3, grpc

role, addresses, name, ttl = sys.argv[1], sys.argv[2].split(","), sys.argv[3], int(sys.argv[4])
OPTIONS = {
    "grpc.keepalive_time_ms": 2000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.use_local_subchannel_pool": 1,
}


def say(*words):
    print(*words, flush=True)


at = os.getpid()


def anywhere(use):
    """Do something with a client of one server after the other, until it succeeds."""
    global at
    while True:
        here = at
        host, port = addresses[here % len(addresses)].split(":")
        client = None
        try:
            client = etcd3.client(host, int(port), timeout=3, grpc_options=OPTIONS.items())
            return use(client)
        except (etcd3.exceptions.Etcd3Exception, grpc.RpcError, ValueError):
            if at == here:
                at += 1
            time.sleep(0.05)
        finally:
            if client is not None:
                client.close()


def line(client):
    found = client.get_prefix_response(name + "/", sort_order="ascend", sort_target="create")
    return found.header.revision, found.kvs


def watched(client, key, revision, prefix=False):
    start = client.watch_prefix if prefix else client.watch
    return start(key, start_revision=revision + 1)[0]


def stand():
    lease = anywhere(lambda client: client.lease(ttl).id)
    key = "%s/%x" % (name, lease)

    def keep():
        while True:
            kept = anywhere(lambda client: list(client.refresh_lease(lease)))
            if not kept or kept[0].TTL <= 0:
                say("lost")
                os._exit(1)
            time.sleep(ttl / 4)

    def join(client):
        compare = [client.transactions.create(key) == 0]
        put = [client.transactions.put(key, "etcd3", lease)]
        client.transaction(compare=compare, success=put, failure=[])

    def lead(client):
        while True:
            revision, kvs = line(client)
            keys = [each.key.decode() for each in kvs]
            if key not in keys:
                say("lost")
                os._exit(1)
            place = keys.index(key)
            if place == 0:
                return kvs[0].create_revision
            for event in watched(client, keys[place - 1], revision):
                if isinstance(event, etcd3.events.DeleteEvent):
                    break

    threading.Thread(target=keep, daemon=True).start()
    try:
        anywhere(join)
        say("leads", key, anywhere(lead))
        threading.Event().wait()
    except KeyboardInterrupt:
        anywhere(lambda client: client.revoke_lease(lease))
        os._exit(0)


def observe():
    told = None

    def follow(client):
        nonlocal told
        revision, kvs = line(client)
        changes = watched(client, name + "/", revision, prefix=True)
        while True:
            first = (kvs[0].key.decode(), kvs[0].create_revision) if kvs else None
            if first is not None and first != told:
                say("leader", *first)
                told = first
            next(changes)
            revision, kvs = line(client)

    anywhere(follow)


{"stand": stand, "observe": observe}[role]()
'''


class Place(NamedTuple):
    """A candidate in the line."""

    revision: int
    """Of its creation."""
    key: str


class Told:
    """A process, and the lines that it prints, which are passed on as they come."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, command: Sequence[str], **variables: str) -> None:
        """Run it to its end."""
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._hear(line.decode().strip())
        finally:
            self.send(signal.SIGKILL)
            await process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class Candidate(ABC):
    """Somebody who stands in the line again and again."""

    kind: ClassVar[str]
    foreign = True

    def __init__(self, line: MixedLine) -> None:
        self.line = line
        self.claim: Place | str | None = None
        """Who it is in the line, once it claims to lead: its place, or its key."""

    @abstractmethod
    async def stand(self) -> None:
        """Stand in the line once, until the term has ended."""

    @abstractmethod
    async def leave(self) -> None:
        """End the term, in one of the ways in which its kind ends."""

    async def run(self) -> None:
        while True:
            try:
                await self.stand()
            finally:
                self.claim = None

    def claims(self, claim: Place | str) -> None:
        self.claim = claim
        self.line.claimed(self)

    def is_at(self, place: Place) -> bool:
        return self.claim is not None and _same(self.claim, place)


class Ours(Candidate):
    """A session of doyen in this process, with links of its own, which can be cut."""

    kind = "ours"
    foreign = False

    def __init__(self, line: MixedLine) -> None:
        super().__init__(line)
        self.term: doyen.Term | None = None
        self._leaving = asyncio.Event()
        self.links: list[Proxy] = []
        self.lost = 0

    async def run(self) -> None:
        async with self.line.linked() as self.links:
            addresses = ",".join(f"{HOST}:{each.port}" for each in self.links)
            url = f"etcd://{addresses}?layout=concurrency"
            async with doyen.connect(url, ttl_s=TTL_S) as self.session:
                await super().run()

    async def stand(self) -> None:
        self._leaving.clear()
        try:
            name = f"ours-{id(self):x}"
            async with self.session.campaign(self.line.name, name=name) as self.term:
                self.claims(Place(self.term.token, ""))
                await self._leaving.wait()
        except doyen.LeadershipLost:
            self.lost += 1

    async def leave(self) -> None:
        """Resign, or lose all links for as long as the term lasts."""
        if self.line.rng.random() < 0.5:
            self._leaving.set()
            return
        term = self.term
        assert term is not None
        for link in self.links:
            link.cut()
        try:
            await self.line.until(lambda: not term.valid, "whoever is cut off stops")
        finally:
            for link in self.links:
                link.heal()


class Programs(Candidate):
    """Candidates that are processes. They print `leads KEY REVISION`."""

    ends: ClassVar[tuple[signal.Signals, ...]] = signal.SIGINT, signal.SIGKILL

    def __init__(self, line: MixedLine) -> None:
        super().__init__(line)
        self.process = Told(self.hear)

    @abstractmethod
    def command(self) -> Sequence[str]: ...

    async def stand(self) -> None:
        await self.process.run(self.command(), **self.line.variables)
        await asyncio.sleep(POLL_S)

    def hear(self, line: str) -> None:
        match line.split():
            case "leads", key, revision:
                self.claims(Place(int(revision), key))
            case ["lost"]:
                self.claim = None

    async def leave(self) -> None:
        self.claim = None
        self.process.send(self.line.rng.choice(self.ends))


class Run(Programs):
    """`doyen run`."""

    kind = "doyen run"
    foreign = False

    def command(self) -> Sequence[str]:
        url = f"etcd://{','.join(self.line.addresses)}?layout=concurrency"
        store = ["--store", url, "--ttl", f"{TTL_S}", "--name", "process"]
        command = ["sh", "-c", 'echo "leads ? $DOYEN_TOKEN"; exec sleep 1000']
        doyen = [sys.executable, "-m", "doyen"]
        return [*doyen, "run", *store, self.line.name, "--", *command]


class Etcd3(Programs):
    """python-etcd3."""

    kind = "etcd3"

    def command(self) -> Sequence[str]:
        return etcd3("stand", self.line)


class Go(Programs):
    """Go's concurrency package."""

    kind = "go"

    def command(self) -> Sequence[str]:
        given = (",".join(self.line.addresses), "elect", self.line.name, "go", str(TTL_S))
        return [str(go_candidate()), *given]


class Elect(Programs):
    """`etcdctl elect`, which prints its key and its proposal. Its lease has 60 s, so it is not
    killed, and its lease is revoked at its end: it does not repeat a request whose response was
    lost with a node. There is one at most."""

    kind = "etcdctl"
    ends = (signal.SIGINT,)

    def command(self) -> Sequence[str]:
        return [str(obtain(ETCDCTL).path), "elect", *PINGS, self.line.name, "etcdctl"]

    def hear(self, line: str) -> None:
        if line.startswith(f"{self.line.name}/"):
            self.claims(line)

    async def stand(self) -> None:
        await super().stand()
        await self.line.clear(b"etcdctl")


def etcd3_interpreter() -> Path:
    return environment("etcd3", ETCD3_NEEDS) / "bin/python"


def etcd3(role: str, line: MixedLine) -> list[str]:
    program = [str(etcd3_interpreter()), "-c", ETCD3]
    return [*program, role, ",".join(line.addresses), line.name, str(TTL_S)]


class Observer:
    """Somebody who is told of every leader."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self._prefix = f"{name}/"
        self.seen: list[int | str] = []
        """The creation revision of each leader, or its key."""

    def hear(self, line: str) -> None:
        """A line of a program: `leader KEY …`, or what `etcdctl elect --listen` prints."""
        key = line.split()[1] if line.startswith("leader ") else line
        if key.startswith(self._prefix):
            self.seen.append(key)

    def knows(self, place: Place) -> bool:
        return bool(self.seen) and self.seen[-1] in (place.revision, place.key)


class MixedLine:
    """The election, its candidates, its observers and its oracle."""

    def __init__(self, name: str, servers: list[str], addresses: list[str]) -> None:
        """The oracle uses the servers directly; all others use the addresses."""
        self.name = name
        self.addresses = addresses
        self.rng = random.Random(name)
        self.objections: list[str] = []
        self.candidates: list[Candidate] = []
        self.observers: list[Observer] = []
        self.terms: list[tuple[str, Place | str]] = []
        """All claims, and who made them."""
        self.changes: list[str] = []
        """What `etcdctl watch` prints."""
        self.variables = {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": ",".join(addresses)}
        self.samples = 0
        self.waits: dict[str, float] = {}
        """The longest time until there was a leader, and until each observer knew, in seconds."""
        self._servers = AnyNode(servers, ping_s=1)
        self._first = 0
        self._start = 0
        self._tasks: list[asyncio.Task[None]] = []

    # Who takes part.

    @asynccontextmanager
    async def running(self, *kinds: type[Candidate], go: bool = False) -> AsyncIterator[MixedLine]:
        """Candidates of these kinds, and observers of every kind."""
        async with asyncio.timeout(PATIENCE_S):
            self._start = (await self._servers.call(rpc.PUT, key=b"start")).header.revision + 1
        etcdctl = str(obtain(ETCDCTL).path)
        watch = ["watch", "--prefix", f"{self.name}/", f"--rev={self._start}", *PINGS]
        commands = {
            "etcdctl": [etcdctl, "elect", "--listen", self.name, *PINGS],
            "etcd3": etcd3("observe", self),
        }
        if go:
            everywhere = ",".join(self.addresses)
            commands["go"] = [str(go_candidate()), everywhere, "observe", self.name]
        try:
            told = Told(self.changes.append)
            self._spawn("etcdctl watch", told.run([etcdctl, *watch], **self.variables))
            for kind, command in commands.items():
                observer = Observer(kind, self.name)
                self.observers.append(observer)
                self._spawn(f"observer {kind}", Told(observer.hear).run(command, **self.variables))
            self._spawn("observer ours", self._observe())
            self._spawn("oracle", self._sample())
            for each in kinds:
                self.add(each)
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._servers.close()

    def add(self, kind: type[Candidate]) -> None:
        """One more candidate of this kind."""
        self.candidates.append(kind(self))
        self._spawn(kind.kind, self.candidates[-1].run())

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[list[Proxy]]:
        """Links of one candidate to all addresses."""
        ports = [int(each.rpartition(":")[2]) for each in self.addresses]
        links = [Proxy(Door(port)).__enter__() for port in ports]
        try:
            yield links
        finally:
            for link in links:
                link.close()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _observe(self) -> None:
        observer = Observer("ours", self.name)
        self.observers.append(observer)
        url = f"etcd://{','.join(self.addresses)}?layout=concurrency"
        async with doyen.connect(url, ttl_s=TTL_S) as session:
            was_unreachable = False
            async for leader in session.observe(self.name):
                # The leader is stated again after `Unreachable`, and only then.
                if isinstance(leader, doyen.Leader) and not (
                    was_unreachable and observer.seen[-1:] == [leader.token]
                ):
                    observer.seen.append(leader.token)
                was_unreachable = isinstance(leader, doyen.Unreachable)

    # What the servers say.

    async def places(self) -> list[Place]:
        """All candidates in the line, in order."""
        found = await self._entries()
        return sorted(Place(each.create_revision, each.key.decode()) for each in found)

    async def _entries(self) -> Any:
        begin, end = f"{self.name}/".encode(), f"{self.name}0".encode()
        return (await self._servers.call(rpc.RANGE, key=begin, range_end=end)).kvs

    async def clear(self, proposal: bytes) -> None:
        """End the leases of all candidates with this proposal."""
        for each in await self._entries():
            if each.value == proposal:
                await self.revoke(each.key.decode())

    async def revoke(self, key: str) -> None:
        """End the lease of a candidate."""
        with suppress(grpc.aio.AioRpcError):  # it has ended
            await self._servers.call(rpc.REVOKE, ID=int(key.rpartition("/")[2], 16))

    async def history(self) -> list[tuple[str, str, int]]:
        """Every change of the line: what it was, its key, and the creation revision of the key."""
        begin, mark = f"{self.name}/".encode(), f"{self.name}0".encode()
        last = (await self._servers.call(rpc.PUT, key=mark)).header.revision
        end = mark + b"\0"
        create = {"key": begin, "range_end": end, "start_revision": self._start, "prev_kv": True}
        stream = self._servers.current.stream(rpc.WATCH)
        changes: list[tuple[str, str, int]] = []
        try:
            await stream.write(rpc.WATCH.request(create_request=create))
            while True:
                response = await stream.read()
                assert response is not grpc.aio.EOF
                assert not response.canceled, response
                for event in response.events:
                    if event.kv.mod_revision >= last:
                        return changes
                    gone = bool(event.type)
                    created = event.prev_kv.create_revision if gone else event.kv.create_revision
                    kind = "DELETE" if gone else "PUT"
                    changes.append((kind, event.kv.key.decode(), created))
        finally:
            stream.cancel()

    # The oracle.

    def claimed(self, candidate: Candidate) -> None:
        assert candidate.claim is not None
        self.terms.append((candidate.kind, candidate.claim))

    async def _sample(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(POLL_S)

    async def sample(self) -> None:
        """Compare the claims with the line."""
        ours = [each for each in self.candidates if isinstance(each, Ours)]
        valid = {each: each.term for each in ours if each.term is not None and each.term.valid}
        claims = {
            each: each.claim
            for each in self.candidates
            if each not in ours and each.claim is not None
        }
        line = await self.places()
        self.samples += 1
        first = line[0] if line else Place(0, "")
        for candidate, term in valid.items():
            if candidate.term is term and term.valid and term.token != first.revision:
                self._object(f"token {term.token} is valid, and {first} is first")
        for other, claim in claims.items():
            there = [each for each in line if _same(claim, each)]
            if there and there[0] != first:
                self._object(f"{other.kind} leads with {claim}, and {first} is first")
        leaders = [each.kind for each, claim in claims.items() if _same(claim, first)]
        leaders += [each.kind for each, term in valid.items() if term.token == first.revision]
        if len(leaders) > 1:
            self._object(f"{leaders} are {first}")
        if first.revision and first.revision < self._first:
            self._object(f"{first} is first after {self._first}")
        self._first = max(self._first, first.revision)

    def _object(self, text: str) -> None:
        if text not in self.objections:
            self.objections.append(text)

    async def judge(self) -> dict[str, int]:
        """Compare all claims with the history. Returns how many terms each kind had."""
        changes = await self.history()
        line: dict[str, int] = {}
        firsts: list[Place] = []
        for kind, key, created in changes:
            if kind == "DELETE":
                line.pop(key, None)
            else:
                line[key] = created
            if line:
                first = min(Place(created, key) for key, created in line.items())
                if not firsts or first != firsts[-1]:
                    firsts.append(first)
        if firsts != sorted({*firsts}):
            self._object(f"firsts are not in order: {firsts}")
        counts: dict[str, int] = {}
        for who, claim in self.terms:
            counts[who] = counts.get(who, 0) + 1
            if not any(_same(claim, each) for each in firsts):
                self._object(f"{who} led with {claim}, which was never the first")
        order = {name: at for at, place in enumerate(firsts) for name in place}
        for observer in self.observers:
            seen = [order.get(each, -1) for each in observer.seen]
            if seen != sorted({*seen}):
                self._object(f"{observer.kind} was told of {observer.seen}, not in order")
        assert not self.objections, self.objections
        await self.until(lambda: len(self.changes) >= 3 * len(changes), "etcdctl watch is told all")
        told = zip(self.changes[::3], self.changes[1::3], strict=False)
        expected = [(kind, key) for kind, key, _ in changes]
        assert [*told][: len(expected)] == expected, "nothing is missed, and nothing told twice"
        return counts

    # What happens.

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    for task in self._tasks:
                        if task.done():
                            task.result()
                            raise AssertionError(f"{task.get_name()} has ended")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"after {PATIENCE_S:g} s, not: {what}; {self.state()}") from None

    def state(self) -> str:
        claims = {each.kind: each.claim for each in self.candidates}
        observed = {each.kind: each.seen[-1:] for each in self.observers}
        return f"claims {claims}, observed {observed}"

    async def holder(self, after: int = 0) -> tuple[Candidate, Place]:
        """Wait until somebody who was created later than this leads, and all observers know."""
        found: list[tuple[Candidate, Place]] = []
        loop = asyncio.get_running_loop()
        began, waited = loop.time(), {"leader": 0.0}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    line = await self.places()
                    if line and line[0].revision > after:
                        found = [(each, line[0]) for each in self.candidates if each.is_at(line[0])]
                        passed = loop.time() - began
                        if not found:
                            waited["leader"] = passed
                        late = [each.kind for each in self.observers if not each.knows(line[0])]
                        waited |= dict.fromkeys(late, passed)
                        if found and not late:
                            break
                    else:
                        waited["leader"] = loop.time() - began
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(
                f"no leader that all know after {PATIENCE_S:g} s: {found}, {await self.places()};"
                f" {self.state()}"
            ) from None
        for what, seconds in waited.items():
            self.waits[what] = max(self.waits.get(what, 0.0), seconds)
        return found[0]

    async def crowd(self, count: int) -> None:
        """Wait until so many stand in the line."""
        async with asyncio.timeout(PATIENCE_S):
            while len(await self.places()) < count:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def turn(self) -> Place:
        """End the term of whoever leads, and wait until another leads."""
        candidate, place = await self.holder()
        await candidate.leave()
        _, following = await self.holder(place.revision)
        return following


def _same(claim: Place | str, place: Place) -> bool:
    if isinstance(claim, str):
        return claim == place.key
    return claim.revision == place.revision
