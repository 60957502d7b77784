"""A trial of a quorum of real processes: load, faults, and a check of the history.

    with Trial(tmp_path) as trial:
        trial.progress(100)
        trial.leader().kill()
        ...
        trial.judge()

Every node is a process with an embedded `doyen.Node` that proposes to a `Ledger` and reads it. It
also has clients of the keyspace that use this node alone, so that a node that is cut off from the
others receives requests as well. One more process has clients that use all nodes. With `lan`, every
node is on a host of its own (see `servers.Lan`), and so are those clients.

Run as a program, this file is such a node (`node`), those clients (`load`) or a client that reads
everything from each node in turn at the end (`survey`). A file beside a node's data directory sets
how long each sync takes, in seconds. `mutant` names one of mutants_served to run instead of the
original.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import doyen
import history
import mutants_served
import servers
from candidates import DOYEN
from doyen.errors import DoyenError, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.quorum.consensus.raft import RaftSettings
from doyen.quorum.node import journal, server
from doyen.quorum.node.framed_files import FileSystem
from doyen.stores.port import Context, Store, open_store
from history import NO, OK, UNKNOWN, WRONG, History, Ledger, Recorder
from nodes import SNAPSHOT_ENTRIES, addresses, often
from served import PATIENCE_S, Served
from servers.tally import fault, tally, tidying

SECRET = "what the nodes of a trial know"
PORT = 7400
CLIENTS = "clients"
KEYS = 3
EPOCH_S = 2.0
"""How long the same keys are used. The search of a key's history takes more than linear time."""
GIVE_UP_S = 4.0
PAUSE_S = 0.02


# The harness.


class Member(Served):
    """A node or the process of clients, and the events that it prints."""

    def __init__(self, name: str, address: str, command: list[str], log: Path) -> None:
        self.role: str | None = None
        self.generation = 0
        self.frozen = False
        super().__init__(name, address, command, log)

    def start(self) -> None:
        self.role = None
        super().start()

    def heard(self, line: str) -> None:
        event = json.loads(line)
        if event["event"] == "role":
            self.role, self.generation = event["role"], event["generation"]
        super().heard(line)

    def hear(self, event: str, **fields: Any) -> dict[str, Any]:
        try:
            return super().hear(event, **fields)
        except queue.Empty:
            raise TimeoutError(f"{self.name} tells of no {event}: {self.log_tail()}") from None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def restart(self) -> None:
        self.start()
        self.hear("listening")

    @fault
    def kill(self) -> None:
        super().kill()

    @fault
    def stop(self) -> int:
        return super().stop()

    @fault
    def freeze(self) -> None:
        super().freeze()
        self.frozen = True

    def thaw(self) -> None:
        super().thaw()
        self.frozen = False

    def quieten(self) -> None:
        """Stop the requests of a node's clients."""
        self.process.send_signal(signal.SIGUSR1)
        self.hear("quiet")

    def ledger(self) -> list[int]:
        """The content of a node's ledger."""
        self.process.send_signal(signal.SIGUSR2)
        kept: list[int] = self.hear("ledger")["kept"]
        return kept

    def log_tail(self) -> str:
        return "" if self._log is None else self._log.read_text()[-2000:]

    @tidying()
    def end(self) -> None:
        if self.running:
            self.thaw()
            self.kill()


class Trial:
    """Nodes, clients, and the history of their requests."""

    def __init__(
        self,
        folder: Path,
        size: int = 3,
        *,
        lan: bool = False,
        serve: bool = False,
        spare: int = 0,
        mutant: str = "",
    ) -> None:
        """With `serve` the nodes run `doyen serve`, with the keyspace only. `spare` nodes are not
        started."""
        self._folder, self._mutant, self._serve = folder, mutant, serve
        self.histories = folder / "histories"
        names = [f"n{number}" for number in range(1, size + spare + 1)]
        self._founders = names[:size]
        self.lan = servers.Lan(*names, CLIENTS) if lan else None
        self.peers: dict[str, str] = dict.fromkeys(names, "")
        self.nodes: dict[str, Member] = {}
        self.load: Member | None = None

    # Starting.

    def __enter__(self) -> Self:
        self.histories.mkdir()
        try:
            if self.lan is not None:
                self.lan.__enter__()
                self.peers = {name: f"{self.lan.address(name)}:{PORT}" for name in self.peers}
            else:
                self.peers = dict(zip(self.peers, addresses(len(self.peers)), strict=True))
            for name in self._founders:
                self.launch(name)
            for node in self.nodes.values():
                node.hear("listening")
            self.leader()
            self.load = self._member(CLIENTS, "", self._program("load", self.url(*self.peers)))
        except BaseException:
            self.close()
            raise
        return self

    def launch(self, name: str, *, join: bool = False) -> Member:
        node = self._member(name, self.peers[name], self._node(name, join))
        self.nodes[name] = node
        return node

    def join(self, name: str) -> Member:
        """Start a new node, which waits to be added to the quorum."""
        node = self.launch(name, join=True)
        node.hear("listening")
        return node

    def retire(self, name: str) -> None:
        """Stop a node that was removed from the quorum."""
        self.nodes.pop(name).end()

    def _node(self, name: str, join: bool) -> list[str]:
        known = [*(self.nodes if join else self._founders), *([name] if join else [])]
        if self._serve:
            secret = self._folder / "secret"
            secret.write_text(SECRET)
            peers = ",".join(f"{peer}={self.peers[peer]}" for peer in known)
            command = [*DOYEN, "serve", "--json", "--id", name, "--peers", peers]
            command += ["--secret-file", str(secret), "--data-dir", str(self.data(name))]
            command += ["--peer-secret-file", str(secret)]
            return [*command, "--join" if join else "--found"]
        given = {
            "name": name,
            "peers": {peer: self.peers[peer] for peer in known},
            "folder": str(self.data(name)),
            "slow": str(self._slow(name)),
            "mutant": self._mutant,
            "join": join,
        }
        return self._program("node", json.dumps(given))

    def _program(self, *arguments: str) -> list[str]:
        return [sys.executable, __file__, str(self.histories), *arguments]

    def _member(self, host: str, address: str, command: list[str]) -> Member:
        log = self._folder / f"{host}.log"
        return Member(host, address, [*self._inside(host), *command], log)

    def _inside(self, host: str) -> list[str]:
        return [] if self.lan is None else self.lan.inside(host)

    def _do(self, *arguments: str) -> None:
        """Run a program on the clients' host, and wait for its end."""
        command = [*self._inside(CLIENTS), *self._program(*arguments)]
        subprocess.run(command, check=True, timeout=2 * PATIENCE_S)

    def data(self, name: str) -> Path:
        return self._folder / name

    def url(self, *names: str) -> str:
        """The URL of these nodes."""
        where = ",".join(self.peers[name] for name in names)
        return f"doyen://{SECRET.replace(' ', '%20')}@{where}"

    # Waiting.

    def leader(self, *among: str, after: int = 0) -> Member:
        """The node, of those named, that reports itself as the leader of the latest generation,
        once that is above `after`."""

        found: list[Member] = []

        def leads() -> list[Member]:
            found[:] = [
                node
                for name, node in self.nodes.items()
                if node.running
                and not node.frozen
                and (name in among or not among)
                and node.role == "leading"
                and node.generation > after
            ]
            return found

        self._wait("there is no leader", leads)
        return max(found, key=lambda node: node.generation)

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [node for node in self.nodes.values() if node is not leader and node.running]

    def caught_up(self, node: Member) -> None:
        """Wait until the node follows or leads."""
        self._wait(
            f"{node.name} finds no leader to follow", lambda: node.role in ("following", "leading")
        )

    def progress(self, count: int = 100) -> None:
        """Wait until this many more requests have been answered."""
        before = self.acknowledged()
        self._wait("requests go unanswered", lambda: self.acknowledged() >= before + count)

    def acknowledged(self) -> int:
        """The number of requests answered so far."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self.histories.iterdir()]
            return sum(line.count(b'"how": "ok"') for file in files for line in file)

    def let_pass(self, seconds: float) -> None:
        """Let time pass while faults are active."""
        until = time.monotonic() + seconds
        self._wait("", lambda: time.monotonic() > until)

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; fail if it takes too long or a process ends by itself."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            self.check_alive()
            if time.monotonic() > until:
                raise TimeoutError(what)
            time.sleep(0.02)

    def check_alive(self) -> None:
        for member in (*self.nodes.values(), *([self.load] if self.load else [])):
            code = member.process.poll()
            assert code in (None, 0, -signal.SIGKILL), f"{member.name} ended: {member.log_tail()}"

    # Judging.

    def judge(self) -> History:
        """End all faults, read everything, and check the history."""
        if self.lan is not None:
            self.lan.heal()
        for node in self.nodes.values():
            self.mend(node)
        self.leader()
        self.progress(20)
        assert self.load is not None
        with tidying():
            self.load.stop()
        if not self._serve:
            for node in self.nodes.values():
                node.quieten()
        self._do("survey", *(self.url(name) for name in self.nodes))
        ledgers = {} if self._serve else {n: m.ledger() for n, m in self.nodes.items()}
        self.check_alive()
        found = History.read(self.histories, ledgers)
        wrong = history.flaws(found)
        tally.elections += max(node.generation for node in self.nodes.values())
        if not self._mutant:
            tally.violations += len(wrong)
        assert not wrong, "\n".join(wrong[:5])
        return found

    def close(self) -> None:
        for member in (*self.nodes.values(), *([self.load] if self.load else [])):
            member.end()
        if self.lan is not None:
            self.lan.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if kind is None:
            for name in self.nodes:
                shutil.rmtree(self.data(name), ignore_errors=True)

    # Hurting.

    def mend(self, node: Member) -> None:
        """Start a node if it is dead, or resume it if it is paused."""
        if not node.running:
            node.restart()
        elif node.frozen:
            node.thaw()

    @fault
    def slow_disk(self, name: str, seconds: float) -> None:
        """Set how long every sync of a node takes."""
        self._slow(name).write_text(str(seconds))

    def _slow(self, name: str) -> Path:
        return self._folder / f"{name}.slow"

    def change_member(self, what: str, node: str) -> None:
        """Change the membership of the quorum, from the clients' host."""
        self._do("change_member", self.url(*self.nodes), what, node, self.peers[node])

    def transfer(self, name: str) -> None:
        """Transfer leadership to this node."""
        if self.leader().name != name:
            self.change_member("transfer", name)


# The programs.


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    """Open a store, with retries until it is available."""
    store: Store | None = None
    while store is None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                store = await open_store(url, Context(SystemClock(), lambda event: None))
        except (StoreUnavailable, OutcomeUnknown, TimeoutError):
            await asyncio.sleep(PAUSE_S)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def answered(recorder: Recorder, number: int) -> AsyncIterator[None]:
    """Record the outcome of a request that is not answered."""
    try:
        async with asyncio.timeout(GIVE_UP_S):
            yield
    except (TimeoutError, OutcomeUnknown):
        recorder.ends(number, UNKNOWN)
    except StoreUnavailable:
        recorder.ends(number, NO)
        await asyncio.sleep(PAUSE_S)
    except DoyenError as error:
        recorder.ends(number, WRONG, result=repr(error))
        await asyncio.sleep(PAUSE_S)


class KeyspaceClient:
    """Reads and replaces the values of a few keys, one request at a time."""

    def __init__(self, recorder: Recorder, store: Store) -> None:
        self._recorder, self._store = recorder, store
        self._client = recorder.client()
        self._seen: dict[str, tuple[int | None, Any]] = {}

    async def run(self, writing: float) -> None:
        """Send requests one after the other; `writing` is the share of writes."""
        while True:
            epoch = f"h/{int(SystemClock().now() / EPOCH_S)}"
            key = f"{epoch}/{random.randrange(KEYS)}"
            if random.random() < writing:
                await self.replace(key)
            elif random.random() < 0.2:
                await self.list(epoch)
            else:
                await self.read(key)
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))

    async def read(self, key: str) -> None:
        number = self._recorder.begins(self._client, "read", key)
        async with answered(self._recorder, number):
            entry = await self._store.get(key)
            self._seen[key] = (int(entry.value), entry.version) if entry else (None, None)
            self._recorder.ends(number, OK, result=self._seen[key][0])

    async def list(self, scope: str) -> bool:
        number = self._recorder.begins(self._client, "list", scope)
        async with answered(self._recorder, number):
            entries = await self._store.list(scope)
            found = {entry.key: int(entry.value) for entry in entries}
            self._recorder.ends(number, OK, result=found)
            return True
        return False

    async def replace(self, key: str) -> None:
        before, version = self._seen.pop(key, (None, None))
        value = self._recorder.value()
        number = self._recorder.begins(self._client, "replace", key, value=value, before=before)
        async with answered(self._recorder, number):
            entry = await self._store.put(key, str(value).encode(), if_version=version)
            if entry is None:
                self._recorder.ends(number, NO, result="refused")
            else:
                self._recorder.ends(number, OK, result=before)
                self._seen[key] = value, entry.version


class LedgerClient:
    """Swaps and reads the ledger through the node in its own process."""

    def __init__(self, recorder: Recorder, node: doyen.Node, ledger: Ledger) -> None:
        self._recorder, self._node, self._ledger = recorder, node, ledger
        self._client = recorder.client()

    async def run(self, writing: float) -> None:
        while True:
            await (self.swap() if random.random() < writing else self.look())
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))

    async def swap(self) -> None:
        value = self._recorder.value()
        number = self._recorder.begins(self._client, "swap", value=value)
        async with answered(self._recorder, number):
            place, before = await self._node.propose(str(value).encode())
            self._recorder.ends(number, OK, result=before, place=place)

    async def look(self) -> None:
        number = self._recorder.begins(self._client, "look")
        async with answered(self._recorder, number):
            await self._node.barrier()
            kept = self._ledger.kept
            place = len(kept)  # others may be added by the node's thread meanwhile
            result = kept[place - 1] if place else None
            self._recorder.ends(number, OK, result=result, place=place)


WRITING = 0.55


async def keyspace_clients(recorder: Recorder, url: str, *writing: float) -> None:
    async def one(writing: float) -> None:
        async with opened(url) as store:
            await KeyspaceClient(recorder, store).run(writing)

    async with asyncio.TaskGroup() as group:
        for each in writing:
            group.create_task(one(each))


async def until(number: signal.Signals, *work: Coroutine[Any, Any, None]) -> None:
    """Run until this signal, or until something fails."""
    tasks = [asyncio.create_task(each) for each in work]

    def stop() -> None:
        for task in tasks:
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop()
        await asyncio.wait(tasks)
    for task in done:
        if not task.cancelled():
            task.result()


def print_event(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class SlowDisk(FileSystem):
    """A disk whose syncs take as long as a file says."""

    file: Path
    writes_too = False

    def sync(self, fd: int, path: Path) -> None:
        self._wait()
        super().sync(fd, path)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.writes_too:
            self._wait()
        super().write(fd, data, offset)

    def _wait(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            threading.Event().wait(float(self.file.read_text()))


async def run_node(folder: Path, given: dict[str, Any]) -> None:
    recorder, ledger = Recorder(folder), Ledger()
    name, peers = given["name"], given["peers"]
    node = doyen.Node(
        name,
        peers=peers,
        data_dir=given["folder"],
        secret=SECRET,
        peer_secret=SECRET,
        machine=ledger,
        join=given["join"],
        found=not given["join"],
    )
    async with often(node):
        print_event(event="listening", node=name)
        url = f"doyen://{SECRET.replace(' ', '%20')}@{peers[name]}"
        # One client of each kind only reads: one that writes waits while there is no leader.
        clients = [LedgerClient(recorder, node, ledger).run(each) for each in (WRITING, 0.0)]
        await until(
            signal.SIGTERM,
            tell_roles(node),
            work(keyspace_clients(recorder, url, WRITING, 0.0), *clients),
            dump(node, ledger),
        )


async def work(*clients: Coroutine[Any, Any, None]) -> None:
    await until(signal.SIGUSR1, *clients)
    print_event(event="quiet")
    await asyncio.Event().wait()


async def dump(node: doyen.Node, ledger: Ledger) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, asked.set)
    await asked.wait()
    await node.barrier()
    print_event(event="ledger", kept=ledger.kept)
    await asyncio.Event().wait()


async def tell_roles(node: doyen.Node) -> None:
    async for standing in node.observe():
        print_event(event="role", role=standing.role, generation=standing.generation)


async def survey(folder: Path, urls: Iterable[str]) -> None:
    recorder = Recorder(folder)
    for url in urls:
        async with opened(url) as store:
            while not await KeyspaceClient(recorder, store).list("h"):
                pass


async def change_member(url: str, what: str, node: str, address: str) -> None:
    from doyen.stores.quorum.store import QuorumStore

    async with opened(url) as store:
        assert isinstance(store, QuorumStore)
        await store.administer(what, node, address)


def main(folder: Path, role: str, *given: str) -> None:
    if role == "node":
        settings = json.loads(given[0])
        SlowDisk.file = Path(settings["slow"])
        vars(journal)["FileSystem"] = SlowDisk
        # Whoever was away for a moment is sent a snapshot.
        vars(server)["Settings"] = partial(RaftSettings, tail_entries=SNAPSHOT_ENTRIES)
        if settings["mutant"]:
            # What a process has written outlives it, synced or not: for those who do not wait for
            # the disk it is writing that takes time.
            SlowDisk.writes_too = True
            mutants_served.install(settings["mutant"])
        asyncio.run(run_node(folder, settings))
    elif role == "load":
        asyncio.run(
            until(signal.SIGTERM, keyspace_clients(Recorder(folder), given[0], *[WRITING] * 4))
        )
    elif role == "survey":
        asyncio.run(survey(folder, given))
    else:
        asyncio.run(change_member(*given))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
