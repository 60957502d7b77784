"""Scenarios about a group of servers with a leader: registration, the switch to another leader, the
published list, and the detection of faults.

Members, elections and published lists are those that users run, under the eyes of the oracle. The
list without names of its own and the store that compares no versions are models of what is broken.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from doyen.errors import NameTaken
from doyen.lab.scenarios.oracle import ManagementOracle
from doyen.lab.scenarios.store_world import TTL_S, StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript, listed
from doyen.manage.members import GroupMember
from doyen.model import Leader, MemberChange, Published, Unreachable, published_key
from doyen.session import Session
from doyen.term import Term

GROUP = "services"
"""The name of the group, and of the election of its leader."""
HEALTH_EVERY_S = 1.0


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class Server:
    """A server: it registers, checks its own health, campaigns, and publishes while it leads."""

    def __init__(self, group: Group, process: str, name: str) -> None:
        self._group = group
        self._world = group.world
        self.process = process
        self.name = name
        self.member: GroupMember | None = None
        self.incarnation = 0
        self.refused = ""
        self.illness = ""

    def health(self) -> None:
        if self.illness:
            raise OSError(self.illness)

    async def run(self, session: Session) -> None:
        address = f"10.0.0.{self.name[-1]}"
        try:
            async with session.member(
                GROUP,
                name=self.name,
                meta={"address": address},
                health=self.health,
                health_every_s=HEALTH_EVERY_S,
            ) as member:
                self.member, self.incarnation = member, member.incarnation or 0
                self._group.oracle.joins(self.process, member)
                self._world.record(self.process, "registers")
                await (self._campaign(session, member) if self._group.elects else forever())
        except NameTaken as error:
            self.refused = str(error)
            self._world.record(self.process, f"is refused: another process is {self.name}")

    async def _campaign(self, session: Session, member: GroupMember) -> None:
        async for campaign in session.campaigns(GROUP, name=self.name, member=member):
            async with campaign as term:
                self._group.oracle.begins(term)
                self._group.terms.append((self._world.now, term))
                self._world.record(self.process, f"leads with token {term.token}")
                async with session.publisher(GROUP, term):
                    await forever()
            self._world.record(self.process, "leads no more")


class Group:
    """The servers of a scenario, and a client that observes them."""

    def __init__(self, world: StoreWorld, *, elects: bool = True) -> None:
        self.world = world
        self.elects = elects
        """Whether the servers elect a leader, which publishes the list."""
        self.oracle = ManagementOracle(world)
        self.servers: dict[str, Server] = {}
        self.terms: list[tuple[float, Term]] = []
        """When each term began, in order."""
        self.changes: list[tuple[float, MemberChange]] = []
        self.leaders: list[Leader | None] = []
        self.lists: list[Published] = []

    async def start(self, process: str, name: str = "") -> Server:
        server = self.servers[process] = Server(self, process, name or process)
        self.world.start(process, server.run)
        await asyncio.sleep(0.5)
        return server

    def observe_members(self) -> None:
        async def run(session: Session) -> None:
            async for change in session.observe_members(GROUP):
                if isinstance(change, MemberChange):
                    self.changes.append((self.world.now, change))
                    self.world.record("client", f"is notified: {described(change)}")

        self.world.start("client", run)

    def observe_leader(self) -> None:
        async def run(session: Session) -> None:
            async for leader in session.observe(GROUP):
                if not isinstance(leader, Unreachable):
                    self.leaders.append(leader)
                    who = "nobody leads" if leader is None else f"{leader.name} leads"
                    self.world.record("client", f"is notified: {who}")

        self.world.start("client", run)

    def observe_list(self) -> None:
        async def run(session: Session) -> None:
            async for published in session.observe_published(GROUP):
                if published:
                    self.lists.append(published)
                    names = listed([each.name for each in published.members])
                    age = "an older list" if published.regressed else "the list"
                    position = f"token {published.token}, version {published.version}"
                    self.world.record("client", f"reads {age} ({position}): {names}")

        self.world.start("client", run)

    def changes_of(self, name: str) -> list[str]:
        return [change.kind for _, change in self.changes if change.member.name == name]

    def at(self, kind: str, name: str) -> float:
        """When the client was last notified of such a change; NaN if it was not."""
        return next(
            (
                at
                for at, change in reversed(self.changes)
                if (change.kind, change.member.name) == (kind, name)
            ),
            math.nan,
        )

    def leads(self, number: int) -> Callable[[], bool]:
        """Whether the term of this number has begun, counted from 1."""
        return lambda: len(self.terms) >= number


def described(change: MemberChange) -> str:
    member = change.member
    if change.kind == "joined":
        return f"{member.name} has joined, incarnation {member.incarnation}"
    if change.kind == "suspected":
        return f"{member.name} is suspected, no renewal for {change.silent_s:.1f} s"
    if change.kind == "changed":
        reason = f" ({member.reason})" if member.reason else ""
        return f"{member.name} is {member.state}{reason}"
    return f"{member.name} is gone"


# Registration.


def registration(transcript: Transcript, *, last_wins: bool = True) -> None:
    transcript.note("A model: the list maps names to addresses, and whoever writes last is on it.")
    addresses: dict[str, str] = {}
    answers = []
    for address in ("10.0.0.2", "10.0.0.9"):
        free = last_wins or "server2" not in addresses
        if free:
            addresses["server2"] = address
        answers.append(free)
        transcript.note(f"  {address} registers as server2: {'done' if free else 'refused'}")
    transcript.note("doyen: the creation of an entry decides, and its revision is the incarnation.")
    run_store_world(transcript, _register)
    transcript.fact(
        "in the model two servers were server2 at once, and clients knew the second only",
        answers == [True, True] and addresses == {"server2": "10.0.0.9"},
    )


async def _register(world: StoreWorld) -> None:
    group = Group(world, elects=False)
    group.observe_members()
    await asyncio.sleep(0.5)
    for name in ("server1", "server2", "server3"):
        await group.start(name)
    first = group.servers["server2"]
    impostor = await group.start("impostor", "server2")
    await world.until(lambda: bool(impostor.refused))
    unharmed = first.member is not None and first.member.incarnation == first.incarnation
    await asyncio.sleep(1.0)
    world.participants["server2"].kill()
    killed_at = world.now
    await world.until(lambda: group.changes_of("server2")[-1] == "gone")
    gone_s = group.at("gone", "server2") - killed_at
    await asyncio.sleep(0.5)
    second = await group.start("server2")
    await asyncio.sleep(0.5)
    fact = world.transcript.fact
    fact(
        "the client was notified of each server when it registered",
        [group.changes_of(f"server{n}")[0] for n in (1, 2, 3)] == ["joined"] * 3,
    )
    fact(
        "a second server2 was refused with who holds the name, and the first one stayed as it was",
        f"incarnation {first.incarnation}" in impostor.refused and unharmed,
    )
    fact(
        f"the client was notified {gone_s:.2f} s after server2's death, within its lease of"
        f" {TTL_S:g} s",
        0 < gone_s <= TTL_S + 0.1,
    )
    fact("server2 came back as a later incarnation", second.incarnation > first.incarnation)
    group.oracle.report()


# The switch to another leader.


def leader_switch(transcript: Transcript) -> None:
    run_store_world(transcript, _switch)


async def _switch(world: StoreWorld) -> None:
    group = Group(world)
    group.observe_leader()
    for name in ("server1", "server2", "server3"):
        await group.start(name)
    await asyncio.sleep(1.0)
    world.participants["server1"].kill()
    killed_at = world.now
    await world.until(group.leads(2))
    died_s = group.terms[1][0] - killed_at
    await asyncio.sleep(2.0)
    world.record("server2", "is about to be updated, and drains")
    draining = group.servers["server2"].member
    assert draining is not None
    drained_at = world.now
    inside = world.participants["server2"].context.copy()
    await world.loop.create_task(draining.drain(), context=inside)
    await world.until(group.leads(3))
    planned_s = group.terms[2][0] - drained_at
    await asyncio.sleep(0.5)
    fact = world.transcript.fact
    names = [term.name for _, term in group.terms]
    fact("each time the next in line led", names == ["server1", "server2", "server3"])
    fact(
        f"after a death the next one led within the lease of {TTL_S:g} s: {died_s:.2f} s later",
        0 < died_s <= TTL_S + 0.1,
    )
    fact(
        f"a leader that is expected to stop hands over in a moment: {planned_s * 1000:.0f} ms",
        0 < planned_s <= 0.1,
    )
    known = [leader.name for leader in group.leaders if leader is not None]
    fact("the client was notified of each leader once", known == names)
    group.oracle.report()


# The published list.


def publishing(transcript: Transcript, *, careless: bool = True) -> None:
    run_store_world(transcript, lambda world: _publish(world, careless=False))
    transcript.note("The same with a store that compares no versions (a broken variant):")
    broken = Transcript()
    lists = run_store_world(broken, lambda world: _publish(world, careless=careless))
    for line in broken.end().lines[-3:]:
        transcript.note(line)
    transcript.fact(
        "without the comparison the late list replaced the newer one, with a server that was dead;"
        " the client could tell that it was older",
        any(each.regressed and "server3" in names(each) for each in lists),
    )


def names(published: Published) -> list[str]:
    return [member.name for member in published.members]


async def _publish(world: StoreWorld, *, careless: bool) -> list[Published]:
    """The leader is paused while it is about to publish, and resumes when another has."""
    group = Group(world)
    refused: list[str] = []

    def written(key: str, value: bytes, entry: object) -> None:
        if key == published_key(GROUP) and entry is None:
            refused.append(key)
            event = "the store refuses the list: another was written since server1 read it"
            world.transcript.record_event(world.now, event)

    world.server.on_put.append(written)
    for name in ("server1", "server2", "server3"):
        await group.start(name)
    group.observe_list()
    await asyncio.sleep(1.0)
    if careless:
        world.server.careless.add(published_key(GROUP))
    server1, arrives = world.participants["server1"], asyncio.Event()

    def sent() -> asyncio.Event:
        world.record("server1", "publishes the list with server4; the request is slow")
        server1.pause()
        return arrives

    world.intercept("server1", "put", published_key(GROUP), sent)
    await group.start("server4")
    await world.until(group.leads(2))
    await asyncio.sleep(1.0)
    world.participants["server3"].kill()
    await world.until(lambda: bool(group.lists) and "server3" not in names(group.lists[-1]))
    await asyncio.sleep(0.5)
    world.transcript.record_event(world.now, "the request of server1 arrives at the store")
    arrives.set()
    await asyncio.sleep(0.05)
    late = list(group.lists)
    if careless:
        return late
    server1.resume()
    await asyncio.sleep(1.0)
    first, second = (term for _, term in group.terms[:2])
    fact = world.transcript.fact
    fact(
        "the first act of server2 as the leader was to write the list, with its token",
        [each.token for each in late if each.token != first.token][:1] == [second.token],
    )
    fact("the late list of server1 was refused", len(refused) == 1)
    positions = [each.position for each in group.lists]
    fact(
        "each list that the client read was later than the one before, and whole",
        positions == sorted(set(positions)) and not any(each.regressed for each in group.lists),
    )
    fact(
        "server1 registered again; the list has it, and not server3",
        names(group.lists[-1]) == ["server1", "server2", "server4"],
    )
    group.oracle.report()
    return late


# The detection of faults.


def fault_detection(transcript: Transcript) -> None:
    run_store_world(transcript, _detect)


async def _detect(world: StoreWorld) -> None:
    group = Group(world)
    for name in ("server1", "server2", "server3"):
        await group.start(name)
    group.observe_members()
    await asyncio.sleep(0.8)
    server1 = group.servers["server1"]
    world.record("server1", "has a disk that fails")
    server1.illness, failed_at = "the disk is read-only", world.now
    await world.until(group.leads(2))
    stepped_s = group.terms[1][0] - failed_at
    await asyncio.sleep(0.5)
    assert server1.member is not None
    world.record("server1", "takes itself off the list")
    inside = world.participants["server1"].context.copy()
    await world.loop.create_task(server1.member.fail(server1.illness), context=inside)
    await asyncio.sleep(0.5)
    before = group.servers["server3"].incarnation
    world.participants["server3"].pause()
    paused_at = world.now
    await world.until(lambda: group.changes_of("server3")[-1] == "gone")
    suspected_s = group.at("suspected", "server3") - paused_at
    gone_s = group.at("gone", "server3") - paused_at
    world.participants["server3"].resume()
    await asyncio.sleep(1.0)
    fact = world.transcript.fact
    fact(
        f"an unhealthy leader stepped down at the next check, {stepped_s:.2f} s later, and another"
        " leads",
        0 < stepped_s <= HEALTH_EVERY_S + 0.1 and group.terms[-1][1].name == "server2",
    )
    fact(
        "the others were notified that server1 is unhealthy, and then that it is gone",
        group.changes_of("server1") == ["joined", "changed", "gone"],
    )
    fact(
        f"a server that is silent was suspected after {suspected_s:.1f} s, and gone after"
        f" {gone_s:.1f} s",
        0 < suspected_s < gone_s <= TTL_S + 0.1,
    )
    again = group.servers["server3"].member
    fact(
        "it was alive after all: it came back by itself, as a later incarnation",
        again is not None and (again.incarnation or 0) > before,
    )
    fact(
        "servers that were well were never suspected",
        group.changes_of("server2") == ["joined"],
    )
    group.oracle.report()
