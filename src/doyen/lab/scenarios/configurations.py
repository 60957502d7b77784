"""A scenario about a change of configuration: the leader writes it, then the followers apply it.

The configuration, its history and its acknowledgements are those that users run, under the eyes of
the oracle. The leader that notifies its followers before it has written is the broken variant.
"""

from __future__ import annotations

import asyncio

import msgspec

from doyen.errors import Conflict, NotApplied
from doyen.lab.scenarios.oracle import ManagementOracle
from doyen.lab.scenarios.store_world import StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript, listed
from doyen.manage.documents import Versioned
from doyen.model import config_key
from doyen.session import Session

CONFIG = "limits"
SERVERS = ("server1", "server2", "server3")


class Limits(msgspec.Struct):
    """The configuration of the servers."""

    requests_per_s: int


class ConfiguredServers:
    """Servers that apply a configuration. The one that leads takes requests to change it."""

    def __init__(self, world: StoreWorld, *, notifies_first: bool) -> None:
        self.world = world
        self.oracle = ManagementOracle(world)
        self.notifies_first = notifies_first
        """The broken variant: followers hear of a change before it is written."""
        self.limits: dict[str, int] = {}
        """What each server applies at present."""
        self.versions: dict[str, list[int]] = {name: [] for name in SERVERS}
        self.leader = ""
        self.not_applied: list[str] = []
        self.conflicts = 0
        self._requests: asyncio.Queue[tuple[int, int | None]] = asyncio.Queue()

    def start(self, name: str) -> None:
        async def run(session: Session) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._apply(session, name))
                tasks.create_task(self._campaign(session, name))

        self.world.start(name, run)

    async def _apply(self, session: Session, name: str) -> None:
        async with session.config(CONFIG, type=Limits).subscribe(name) as documents:
            async for document in documents:
                self.oracle.applies(name, CONFIG, document)
                self.versions[name].append(document.version)
                self.limits[name] = limit = document.value.requests_per_s
                self.world.record(name, f"has applied version {document.version}: {limit}")

    async def _campaign(self, session: Session, name: str) -> None:
        async for campaign in session.campaigns("services", name=name):
            async with campaign as term:
                self.oracle.begins(term)
                self.world.record(name, f"leads with token {term.token}")
                self.leader = name
                while True:
                    await self._change(session, name, *await self._requests.get())

    async def _change(
        self, session: Session, name: str, limit: int, if_version: int | None
    ) -> None:
        if self.notifies_first:
            self.limits.update(dict.fromkeys(SERVERS, limit))
            self.world.record(name, f"notifies the followers: {limit}")
        try:
            document = await session.config(CONFIG, type=Limits, author=name).set(
                Limits(limit), if_version=if_version, wait_applied="all", wait_s=1.0
            )
            self.world.record(name, f"answers: all have applied version {document.version}")
        except NotApplied as error:
            self.not_applied += error.waiting
            self.world.record(name, f"answers: written; not yet applied by {listed(error.waiting)}")
        except Conflict:
            self.conflicts += 1
            self.world.record(name, f"answers: refused, since version {if_version} is not current")

    async def request(self, limit: int, *, if_version: int | None = None) -> None:
        """A client asks the leader for another limit. Returns a while later."""
        based = "" if if_version is None else f", based on version {if_version}"
        self.world.record("client", f"asks for {limit} requests per second{based}")
        self._requests.put_nowait((limit, if_version))
        await asyncio.sleep(1.5)

    def stored(self) -> int:
        """What the store has."""
        entry = self.world.server.get(config_key(CONFIG, "current"))
        assert entry is not None
        return int(Versioned.decode(entry).body["value"]["requests_per_s"])


def config_change(transcript: Transcript, *, notifies_first: bool = True) -> None:
    run_store_world(transcript, _change)
    transcript.note("The same with a leader that notifies first, then writes (a broken variant):")
    applied, stored = run_store_world(
        transcript, lambda world: _die_while_changing(world, notifies_first)
    )
    transcript.fact(
        f"notified before it was written, the followers applied {applied}, which the store never"
        f" had: it has {stored}",
        applied != stored,
    )


async def _started(world: StoreWorld, *, notifies_first: bool = False) -> ConfiguredServers:
    servers = ConfiguredServers(world, notifies_first=notifies_first)
    for name in SERVERS:
        servers.start(name)
        await asyncio.sleep(0.1)
    await servers.request(10)
    return servers


def _kill_before_the_write(world: StoreWorld) -> None:
    """Have server1 killed when it has copied the current version to the history, and is about to
    replace it."""
    key = config_key(CONFIG, "current")
    world.intercept("server1", "put", key, world.participants["server1"].kill)


async def _change(world: StoreWorld) -> None:
    servers = await _started(world)
    server3 = world.participants["server3"]
    server3.pause()
    await servers.request(20)
    await servers.request(30)
    server3.resume()
    await asyncio.sleep(0.5)
    await servers.request(35, if_version=2)
    _kill_before_the_write(world)
    await servers.request(40)
    left = dict(servers.limits)
    await world.until(lambda: servers.leader == "server2")
    await servers.request(40, if_version=3)
    fact = world.transcript.fact
    fact(
        "the leader knew who had not applied a change; the change was in force nevertheless",
        servers.not_applied == ["server3", "server3"],
    )
    fact(
        "server3 was paused during two changes, and applied both in their order",
        servers.versions["server3"][:3] == [1, 2, 3],
    )
    fact("a change based on an old version was refused", servers.conflicts == 1)
    fact(
        "the change during which server1 was killed was not half applied: all stayed at 30",
        set(left.values()) == {30},
    )
    fact(
        "its successor made the same change, as version 4",
        [servers.versions[name] for name in SERVERS[1:]] == [[1, 2, 3, 4]] * 2,
    )
    servers.oracle.report()


async def _die_while_changing(world: StoreWorld, notifies_first: bool) -> tuple[int, int]:
    """Returns what server2 applies after the death of the leader, and what the store has."""
    servers = await _started(world, notifies_first=notifies_first)
    _kill_before_the_write(world)
    await servers.request(20)
    return servers.limits["server2"], servers.stored()
