"""Scenarios about elections in a store: how the end of a leader is noticed, how many candidates are
notified, and what a leader that has not noticed its own end can still do.

Sessions, elections and fencing are those that users run. The master row without a lease and the
register without a guard are models.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial

from doyen.election.options import Recipe
from doyen.errors import LeadershipLost, StaleToken
from doyen.fencing import SQLGuard
from doyen.lab.scenarios.store_world import TTL_S, StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript
from doyen.session import Session
from doyen.term import Term


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# The master row.


class MasterRow:
    """The model: a row whose primary key only one server can insert as long as it exists. With
    `ttl_s` it ends that long after it was written."""

    def __init__(self, *, ttl_s: float | None = None) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE master (id INTEGER PRIMARY KEY, name TEXT, at REAL)")
        self._ttl_s = ttl_s

    def claim(self, name: str, now: float) -> bool:
        """Insert the row. False if the key exists."""
        with self._database:
            if self._ttl_s is not None:
                self._database.execute("DELETE FROM master WHERE at < ?", (now - self._ttl_s,))
            try:
                self._database.execute("INSERT INTO master VALUES (1, ?, ?)", (name, now))
            except sqlite3.IntegrityError:
                return False
        return True

    def holder(self) -> str:
        return str(self._database.execute("SELECT name FROM master").fetchone()[0])

    def close(self) -> None:
        self._database.close()


def master_row(transcript: Transcript, *, row_ttl_s: float | None = None) -> None:
    transcript.note(
        "A model: INSERT INTO master (id, …) VALUES (1, …); the primary key admits one row."
    )
    with closing(MasterRow(ttl_s=row_ttl_s)) as row:
        first, second = row.claim("server1", 0.0), row.claim("server2", 0.1)
        transcript.record(0.0, "server1", "inserts the row: it is the master")
        transcript.record(0.1, "server2", "gets a duplicate key error: it is not")
        transcript.record(3.0, "server1", "is killed; the database does not notice")
        tries = [row.claim("server2", 3.0 + second) for second in range(1, 61)]
        holder = row.holder()
    transcript.record(
        63.0, "server2", f"has tried {len(tries)} times; the row still names {holder}"
    )
    transcript.fact("the primary key admits exactly one", first and not second)
    transcript.fact(
        "a minute after the master's death the row still exists, and no server was notified",
        not any(tries) and holder == "server1",
    )
    transcript.note("A lease that ends by itself, and a store that notifies watchers:")
    took_s, tokens = run_store_world(transcript, _lease_and_notification)
    transcript.fact(
        f"server2 led {took_s:.2f} s after server1's death, within its lease of {TTL_S:g} s",
        0 < took_s <= TTL_S + 0.1,
    )
    transcript.fact("it leads with a later token", tokens == sorted(set(tokens)))


async def _lease_and_notification(world: StoreWorld) -> tuple[float, list[int]]:
    """Returns how long it took until server2 led, and the tokens."""
    terms: list[Term] = []
    led_at = asyncio.get_running_loop().create_future()

    def start(name: str) -> None:
        async def run(session: Session) -> None:
            async with session.campaign("/SystemExpert/leader", name=name) as term:
                terms.append(term)
                world.record(name, f"leads with token {term.token}")
                if len(terms) == 2:
                    led_at.set_result(world.now)
                await forever()

        world.start(name, run)

    start("server1")
    await asyncio.sleep(0.5)
    start("server2")
    await asyncio.sleep(2.5)
    world.participants["server1"].kill()
    killed_at = world.now
    world.record("server2", "watches, and waits for a notification")
    at: float = await led_at
    notified_at = min(
        when for when, name in world.notified if name == "server2" and when > killed_at
    )
    sent = [what for when, what in world.calls if killed_at < when < notified_at]
    world.transcript.fact(
        "until the lease had ended it sent no request to the store; then it was notified",
        all(what == "renew" for what in sent),
    )
    return at - killed_at, [term.token for term in terms]


# The herd.

FEW = 20
"""Up to so many candidates are at a distance from the store, so that one can see their requests."""
SETTLED_S = 0.05


def herd(transcript: Transcript, *, crowded: Recipe = "race", most: int = 1000) -> None:
    transcript.note("Candidates wait behind guid_0000000001, which leads and then resigns.")
    crowds = (most // 100, most // 10, most)
    rows = {
        (recipe, crowd): run_store_world(
            transcript, partial(_resign, recipe=recipe, crowd=crowd), local=crowd > FEW
        )
        for recipe in dict.fromkeys((crowded, "line"))
        for crowd in crowds
    }
    all_notified, asked = rows[crowded, most]
    (one_notified,) = {tuple(rows["line", crowd][0]) for crowd in crowds}
    first, last = all_notified[0], all_notified[-1]
    transcript.note(f"If all watch the leader's key, {first} to {last} are notified.")
    names = " and ".join(one_notified)
    transcript.note(f"If each watches the one ahead of it, {names} is notified.")
    transcript.note("")
    transcript.note("waiting   notified, one key for all   notified, in a line")
    for crowd in crowds:
        transcript.note(f"{crowd:7}   {len(rows[crowded, crowd][0]):25}   {len(one_notified):19}")
    transcript.fact(
        f"all {most} that watched the leader's key were notified, though only one can lead",
        len(all_notified) == most,
    )
    transcript.fact(
        f"the store received {asked} requests to create it, {asked - 1} of them in vain",
        asked >= most,
    )
    transcript.fact(
        "in a line one was notified and tried, however many waited",
        [rows["line", crowd] for crowd in crowds] == [(["guid_0000000002"], 1)] * 3,
    )


async def _resign(world: StoreWorld, *, recipe: Recipe, crowd: int) -> tuple[list[str], int]:
    """Returns who was notified when the leader resigned, and how many creations were requested."""
    shared = recipe == "race"
    world.title = f"{crowd} wait, and {'all watch one key' if shared else 'each watches one'}."
    led = asyncio.Semaphore(0)
    ended = asyncio.Event()

    def start(number: int) -> None:
        async def run(session: Session) -> None:
            async with session.campaign(
                "/app/leader_election", name=f"guid_{number:010}", recipe=recipe
            ):
                led.release()
                if number == 1:
                    await ended.wait()
                else:
                    await forever()

        world.start(f"guid_{number:010}", run, ttl_s=60.0)

    for number in range(1, crowd + 2):
        start(number)
        if not world.local:
            await asyncio.sleep(0.002)  # so that they take their tickets in this order
    await led.acquire()
    await asyncio.sleep(SETTLED_S)
    world.notified.clear()
    world.calls.clear()
    ended.set()
    await led.acquire()
    await asyncio.sleep(SETTLED_S)
    notified = sorted({name for _, name in world.notified} - {"guid_0000000001"})
    return notified, [what for _, what in world.calls].count("create")


# The paused leader.


class Register:
    """The model: accepts every write."""

    def __init__(self) -> None:
        self.value = ""

    def write(self, value: str, token: int) -> None:
        self.value = value


class GuardedRegister(Register):
    """A row in a database, with `SQLGuard` in the same transaction."""

    def __init__(self) -> None:
        super().__init__()
        self._database = sqlite3.connect(":memory:")
        self._guard = SQLGuard()
        self._guard.create(self._database)

    def write(self, value: str, token: int) -> None:
        with self._database:
            self._guard.check(self._database, "report", token)
            self.value = value

    def close(self) -> None:
        self._database.close()


def paused_leader(transcript: Transcript, *, bare: Register | None = None) -> None:
    with closing(GuardedRegister()) as guarded:
        bare = bare or Register()
        registers = {"the unguarded file": bare, "the guarded row": guarded}
        refused, tokens, overlap = run_store_world(
            transcript, lambda world: _pause(world, registers)
        )
        transcript.fact(
            "the file without a guard contains server1's late write", bare.value == "server1's"
        )
        transcript.fact(
            f"the row had seen token {tokens[-1]} and refused token {tokens[0]}:"
            " it contains server2's",
            refused == ["the guarded row"] and guarded.value == "server2's",
        )
    transcript.fact("when server1 resumed, its own term reported that it was over", not overlap)
    transcript.fact("tokens increase", tokens == sorted(set(tokens)))


async def _pause(
    world: StoreWorld, registers: dict[str, Register]
) -> tuple[list[str], list[int], bool]:
    """Returns which registers refused a write, the tokens, and whether server1 still considered
    itself the leader when it resumed."""
    refused: list[str] = []
    terms: list[Term] = []

    def write(name: str, term: Term) -> None:
        for target, register in registers.items():
            try:
                register.write(f"{name}'s", term.token)
                world.record(name, f"writes to {target} with token {term.token}")
            except StaleToken:
                refused.append(target)
                world.record(name, f"is refused by {target}, which has seen a later token")

    def start(name: str, in_s: float) -> None:
        async def run(session: Session) -> None:
            try:
                async with session.campaign("/SystemExpert/leader", name=name) as term:
                    terms.append(term)
                    world.record(name, f"leads with token {term.token}")
                    await asyncio.sleep(1.0)
                    term.check()
                    # As if handed to another thread: from here on only the resource can stop it.
                    world.record(name, "has checked that it leads, and sends a write")
                    asyncio.get_running_loop().call_later(in_s, write, name, term)
                    await forever()
            except LeadershipLost:
                world.record(name, "gets LeadershipLost")

        world.start(name, run)

    start("server1", 0.1)
    await asyncio.sleep(0.1)
    start("server2", 0.0)
    await asyncio.sleep(0.95)
    world.participants["server1"].pause()
    await world.until(lambda: len(terms) == 2)
    await asyncio.sleep(2.0)
    world.participants["server1"].resume()
    overlap = terms[0].valid
    await asyncio.sleep(1.0)
    return refused, [term.token for term in terms], overlap
